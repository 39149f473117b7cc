"""Files that came with a load request, in a private folder that lives as long as what was loaded from them."""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import os
import re
import shutil
import stat
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

from tengserve_backend.errors import InvalidRequestError, shown
from tengserve_backend.repository.source import ModelSource

MAX_FILES = 1024
MAX_BYTES = 1 << 30
"""Of one request, whatever its dialect takes."""
MAX_DEPTH = 16

_PREFIX = "tengserve-models-"
_LOCK = "lock"
_PART = re.compile(r"[A-Za-z0-9._+@=-]{1,255}", re.ASCII)

_log = logging.getLogger(__name__)


class Overlays:
    """Owns the folders, all of them in one of this process, which is there while one is. May be called from any thread.

    A process that is killed cannot remove its folder. It holds a lock on a file in there as long as it lives, whatever
    ends it; so the next server of the same user tells what is left behind from what is in use.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Sources that somebody may still load from or serve, by the folder of their model.
        self._users: dict[Path, int] = {}
        self._root: Path | None = None
        self._held: int | None = None
        self._numbers = itertools.count(1)

    def write(self, name: str, files: Mapping[str, bytes]) -> Path:
        """A new folder of a model with these files in it. It has one user, its maker: `drop` it at last.

        Args:
            name: of the model; a name of a folder.
            files: path in the model's folder to content.

        Raises:
            InvalidRequestError: a path leaves the folder or is too long, or there are too many files or bytes.
        """
        checked = _checked(files)
        with self._lock:
            folder = self._own_folder() / str(next(self._numbers)) / name
            self._users[folder] = 1
        try:
            folder.mkdir(parents=True)
            for path, content in checked.items():
                target = folder.joinpath(*path)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
        except OSError as error:
            self.drop(folder)
            if isinstance(error, FileExistsError | NotADirectoryError | IsADirectoryError):
                raise InvalidRequestError("a file of the request is a folder of another one", field="files") from None
            if error.errno == errno.ENAMETOOLONG:
                raise InvalidRequestError("a path of the request is too long for this system", field="files") from None
            raise
        return folder

    def use(self, source: ModelSource) -> None:
        """Keep the folder that a source is in until `release`. Does nothing for other folders."""
        folder = source.version_dir.parent
        with self._lock:
            if folder in self._users:
                self._users[folder] += 1

    def release(self, source: ModelSource) -> None:
        """The source is not loaded any more."""
        self.drop(source.version_dir.parent)

    def drop(self, folder: Path) -> None:
        """One user less; the folder goes with its last one. Does nothing for other folders."""
        with self._lock:
            left = self._users.get(folder, 0) - 1
            if left > 0:
                self._users[folder] = left
            if left != 0:
                return
            del self._users[folder]
            if self._users:
                _remove(folder.parent)
            else:
                self._remove_own()

    def close(self) -> None:
        """Remove every folder; for the end of the process. Harmless when called again."""
        with self._lock:
            self._users.clear()
            self._remove_own()

    def _own_folder(self) -> Path:
        """The folder of this process, made with the first model's. Under the lock."""
        if self._root is None:
            # It is readable for this user alone.
            root = Path(tempfile.mkdtemp(prefix=_PREFIX))
            try:
                self._held = _hold(root)
            except OSError:
                _remove(root)
                raise
            self._root = root
        return self._root

    def _remove_own(self) -> None:
        """Under the lock."""
        if self._root is not None and self._held is not None:
            _remove(self._root)
            os.close(self._held)
        self._root = self._held = None


def _hold(root: Path) -> int:
    """A descriptor of the folder's lock, which is held until it is closed."""
    # Whoever sees the file under its name finds it locked.
    unnamed = root / f"{_LOCK}.new"
    held = os.open(unnamed, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        unnamed.rename(root / _LOCK)
    except OSError:
        os.close(held)
        raise
    return held


def remove_left_behind() -> None:
    """Remove the folders of processes of this user that were killed before they could."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            of = folder.lstat()
            if not stat.S_ISDIR(of.st_mode) or of.st_uid != os.getuid():
                continue
            held = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # Somebody else removes it, or makes it just now.
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # Its process lives.
        else:
            _log.info("removing the files of load requests to a server that was killed")
            _remove(folder)
        finally:
            os.close(held)


def _remove(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except OSError as error:
        _log.warning("files of a load request were not removed (%s)", error.strerror)


def _checked(files: Mapping[str, bytes]) -> dict[tuple[str, ...], bytes]:
    if len(files) > MAX_FILES or sum(map(len, files.values())) > MAX_BYTES:
        raise InvalidRequestError(
            f"a load request may have at most {MAX_FILES} files of together {MAX_BYTES} bytes", field="files"
        )
    checked = {}
    for path, content in files.items():
        parts = tuple(path.split("/"))
        if len(parts) > MAX_DEPTH or not all(_PART.fullmatch(part) and part not in (".", "..") for part in parts):
            raise InvalidRequestError(
                f"a file of a load request must have a path in the model's folder, such as 1/model.py, of letters,"
                f' digits and ". _ + @ = -", not "{shown(path)}"',
                field=f"file:{shown(path)}",
            )
        checked[parts] = content
    return checked
