"""Files that came with a load request, in a private folder that lives as long as what was loaded from them."""

from __future__ import annotations

import errno
import logging
import re
import shutil
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

_PART = re.compile(r"[A-Za-z0-9._+@=-]{1,255}", re.ASCII)

_log = logging.getLogger(__name__)


class Overlays:
    """Owns the folders. May be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Sources that somebody may still load from or serve, by the folder of their model.
        self._users: dict[Path, int] = {}

    def write(self, name: str, files: Mapping[str, bytes]) -> Path:
        """A new folder of a model with these files in it. It has one user, its maker: `drop` it at last.

        Args:
            name: of the model; a name of a folder.
            files: path in the model's folder to content.

        Raises:
            InvalidRequestError: a path leaves the folder or is too long, or there are too many files or bytes.
        """
        checked = _checked(files)
        # The folder is readable for this user alone.
        folder = Path(tempfile.mkdtemp(prefix="tengserve-model-"), name)
        with self._lock:
            self._users[folder] = 1
        try:
            folder.mkdir()
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
        _remove(folder)

    def close(self) -> None:
        """Remove every folder; for the end of the process."""
        with self._lock:
            folders = list(self._users)
            self._users.clear()
        for folder in folders:
            _remove(folder)


def _remove(folder: Path) -> None:
    try:
        shutil.rmtree(folder.parent)
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
