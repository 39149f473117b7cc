"""The weights cache: a GGUF file is converted once, and found again by its content.

Layout, under `$TENGSERVE_CACHE_DIR`, else `$XDG_CACHE_HOME/tengserve`, else `~/.cache/tengserve`:

```
gguf/<sha256 of the GGUF file>-<format>/             the converted folder and its manifest.json
gguf/<sha256 of the GGUF file>-<format>.partial-*/   while it is being written; a killed server leaves it behind
gguf/<sha256 of the GGUF file>-<format>.lock         held by the server that writes
```

An entry appears by one rename, so it is whole or absent. The lock is the operating system's: it goes with its process.
Each use checks every file against the size and the CRC-32 in the manifest (2 GB/s: 0.3 s for 540 MB); an entry that
differs is made anew. Nothing is evicted: there is one entry per GGUF file that was ever served, and any may be deleted
while no server starts.
"""

from __future__ import annotations

import hashlib
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
from tengserve_backend.repository.source import Progress

FORMAT = 1
"""Raised whenever a conversion would come out differently, so that older entries are not taken for new ones."""

LOCK_TIMEOUT_S = 900.0
"""How long to wait for another process that converts the same file. A large model takes minutes."""

Convert = Callable[[Path, Path, Progress], None]
"""Converts a GGUF file (first) into files in an empty folder (second)."""

_MANIFEST = "manifest.json"
_LOCK_POLL_S = 0.5
_CHUNK_BYTES = 4 * 2**20

_log = logging.getLogger(__name__)


def cache_root() -> Path:
    """The folder of the cache; it need not exist yet."""
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


def converted(
    gguf: Path, root: Path, convert: Convert, progress: Progress, *, lock_timeout_s: float = LOCK_TIMEOUT_S
) -> Path:
    """The folder that `convert` makes of a GGUF file: from the cache, or made now.

    Blocks while another process makes the same entry, and then uses that. A whole entry is used without writing
    anything, so a cache may also be read-only.

    Raises:
        ConfigurationError: the cache cannot be written, or another process converts for longer than the limit.
    """
    name = f"{_sha256(gguf, progress)}-{FORMAT}"
    entry = root / "gguf" / name
    if _is_whole(entry):
        return entry
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with _locked(entry.parent / f"{name}.lock", progress, lock_timeout_s):
            # Somebody else may have made it while we waited.
            if not _is_whole(entry):
                _make(gguf, entry, convert, progress)
    except OSError as error:
        raise ConfigurationError(
            f"the weights cache cannot be written ({error.strerror or type(error).__name__}): "
            f"set TENGSERVE_CACHE_DIR to a writable folder with enough space for the weights in float32"
        ) from error
    return entry


def _make(gguf: Path, entry: Path, convert: Convert, progress: Progress) -> None:
    """Write an entry beside its place and move it there. The caller holds the lock."""
    for leftover in (entry, *entry.parent.glob(f"{entry.name}.partial-*")):
        if leftover.exists():
            _log.warning("weights cache: %s is damaged or unfinished and is removed", leftover.name)
            shutil.rmtree(leftover)
    # A name of its own: whatever outlived a killed server writes elsewhere.
    partial = Path(tempfile.mkdtemp(prefix=f"{entry.name}.partial-", dir=entry.parent))
    try:
        convert(gguf, partial, progress)
        files = {file.name: _fingerprint(file) for file in sorted(partial.iterdir())}
        (partial / _MANIFEST).write_text(json.dumps({"format": FORMAT, "files": files}, indent=1), encoding="utf-8")
        partial.chmod(0o755)  # mkdtemp's 0700 would keep a cache from being shared.
        for file in partial.iterdir():
            file.chmod(0o644)
        partial.rename(entry)
    except BaseException:
        # Whatever ended it, interrupts included, a half-written copy of the weights is of no use to anybody.
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _is_whole(entry: Path) -> bool:
    """Whether an entry is there and each of its files is as it was written."""
    try:
        manifest: Any = json.loads((entry / _MANIFEST).read_bytes())
        files = manifest["files"]
        return bool(files) and all(_fingerprint(entry / name) == expected for name, expected in files.items())
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        # Absent or damaged: for every kind of damage the answer is the same.
        return False


def _fingerprint(file: Path) -> dict[str, int]:
    """Size and CRC-32: they tell accidents apart, which is all that a cache of one's own needs."""
    crc = 0
    size = 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
            size += len(chunk)
    return {"size": size, "crc32": crc}


def _sha256(gguf: Path, progress: Progress) -> str:
    """The key of a file's content; raises ConfigurationError when the file cannot be read."""
    digest = hashlib.sha256()
    done = 0
    try:
        with gguf.open("rb") as stream:
            total = max(1, os.fstat(stream.fileno()).st_size)
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
                done += len(chunk)
                progress("checking the weights", min(1.0, done / total))
    except OSError as error:
        raise ConfigurationError(f"the GGUF file cannot be read ({error.strerror})") from error
    return digest.hexdigest()


@contextmanager
def _locked(file: Path, progress: Progress, timeout_s: float) -> Iterator[None]:
    """Hold a lock file, waiting for it in short turns so that a server that stops meanwhile can end."""
    lock = filelock.FileLock(file)
    started = time.monotonic()
    while True:
        try:
            lock.acquire(timeout=min(_LOCK_POLL_S, timeout_s))
            break
        except filelock.Timeout:
            waited = time.monotonic() - started
            if waited >= timeout_s:
                raise ConfigurationError(
                    f"another process has been converting the same weights for more than {timeout_s:.0f} s: "
                    f"end it, or start again when it is done"
                ) from None
            progress("waiting for another process that converts the weights", waited / timeout_s)
    try:
        yield
    finally:
        lock.release()
