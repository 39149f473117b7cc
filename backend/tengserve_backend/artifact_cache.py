"""Files that take long to make, made once and kept on disk: converted weights and compiled kernels.

An entry is a folder. It appears by one rename, so it is whole or absent; a manifest in it tells damage. Beside it lie,
while it is being made, `<entry>.partial-*`, which a killed process leaves behind, and `<entry>.lock`, held by whoever
makes it. The lock is the operating system's: it goes with its process.

Each use checks every file against the size and the CRC-32 in the manifest (2 GB/s); an entry that differs is made
anew. Nothing is evicted, and any entry may be deleted while no server starts.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import filelock

from tengserve_backend.errors import ConfigurationError

_MANIFEST = "manifest.json"
_LOCK_POLL_S = 0.5
_CHUNK_BYTES = 4 * 2**20

_log = logging.getLogger(__name__)


class ArtifactBusyError(Exception):
    """Another process has been making the same entry for longer than was to be waited."""


def cache_root() -> Path:
    """The folder of the cache, which need not exist yet.

    `$TENGSERVE_CACHE_DIR`, else `$XDG_CACHE_HOME/tengserve`, else `~/.cache/tengserve`.

    Raises:
        ConfigurationError: there is no home folder either.
    """
    if chosen := os.environ.get("TENGSERVE_CACHE_DIR"):
        return Path(chosen).expanduser().absolute()
    if (xdg := os.environ.get("XDG_CACHE_HOME")) and Path(xdg).is_absolute():
        return Path(xdg, "tengserve")
    try:
        return Path.home() / ".cache" / "tengserve"
    except RuntimeError as error:
        raise ConfigurationError(
            "there is no home folder for the weights cache: set TENGSERVE_CACHE_DIR to a writable folder"
        ) from error


def artifact(
    entry: Path,
    make: Callable[[Path], None],
    *,
    lock_timeout_s: float,
    waiting: Callable[[float], None] = lambda waited_s: None,
) -> Path:
    """An entry: as it is, or made now.

    Blocks while another process makes it, and then uses that. A whole entry is used without writing anything, so a
    cache may also be read-only.

    Args:
        entry: its place; the last part of the name is the key of its content.
        make: writes its files into an empty folder.
        lock_timeout_s: how long to wait for another process.
        waiting: told meanwhile, twice a second, how long that has been; an error that it raises ends the wait.

    Returns:
        `entry`.

    Raises:
        OSError: the cache cannot be written.
        ArtifactBusyError: see there.
    """
    if is_whole(entry):
        return entry
    entry.parent.mkdir(parents=True, exist_ok=True)
    with _locked(entry.parent / f"{entry.name}.lock", waiting, lock_timeout_s):
        # Somebody else may have made it while we waited.
        if not is_whole(entry):
            _make(entry, make)
    return entry


def is_whole(entry: Path) -> bool:
    """Whether an entry is there and each of its files is as it was written."""
    try:
        manifest: Any = json.loads((entry / _MANIFEST).read_bytes())
        files = manifest["files"]
        return bool(files) and all(_fingerprint(entry / name) == expected for name, expected in files.items())
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        # Absent or damaged: for every kind of damage the answer is the same.
        return False


def _make(entry: Path, make: Callable[[Path], None]) -> None:
    """Write an entry beside its place and move it there. The caller holds the lock."""
    for leftover in (entry, *entry.parent.glob(f"{entry.name}.partial-*")):
        if leftover.exists():
            _log.warning("cache: %s is damaged or unfinished and is removed", leftover.name)
            # Only the entry is in the way: into the others a process that outlived its server may still write.
            shutil.rmtree(leftover, ignore_errors=leftover != entry)
    # A name of its own: whatever outlived a killed server writes elsewhere.
    partial = Path(tempfile.mkdtemp(prefix=f"{entry.name}.partial-", dir=entry.parent))
    try:
        make(partial)
        files = {file.name: _fingerprint(file) for file in sorted(partial.iterdir())}
        (partial / _MANIFEST).write_text(json.dumps({"files": files}, indent=1), encoding="utf-8")
        partial.chmod(0o755)  # mkdtemp's 0700 would keep a cache from being shared.
        for file in partial.iterdir():
            file.chmod(0o644)
        partial.rename(entry)
    except BaseException:
        # Whatever ended it, interrupts included, a half-written entry is of no use to anybody.
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _fingerprint(file: Path) -> dict[str, int]:
    """Size and CRC-32: they tell accidents apart, which is all that a cache of one's own needs."""
    crc = 0
    size = 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
            size += len(chunk)
    return {"size": size, "crc32": crc}


@contextmanager
def _locked(file: Path, waiting: Callable[[float], None], timeout_s: float) -> Iterator[None]:
    """Hold a lock file, waiting for it in short turns so that a server that stops meanwhile can end."""
    lock = filelock.FileLock(file)
    started = time.monotonic()
    while True:
        try:
            lock.acquire(timeout=min(_LOCK_POLL_S, timeout_s))
            break
        except NotImplementedError as error:  # filelock's word for a file system without locks.
            raise OSError(errno.ENOTSUP, "its file system has no locks") from error
        except filelock.Timeout:
            waited = time.monotonic() - started
            if waited >= timeout_s:
                raise ArtifactBusyError from None
            waiting(waited)
    try:
        yield
    finally:
        lock.release()
