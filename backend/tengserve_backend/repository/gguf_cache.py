"""The weights cache: a GGUF file is converted once, and found again by its content.

It is a part of the cache that `artifact_cache` describes: `gguf/<sha256 of the GGUF file>-<format>/` holds a converted
folder. Checking one of 540 MB takes 0.3 s. There is one entry per GGUF file that was ever served.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from tengserve_backend.artifact_cache import ArtifactBusyError, artifact
from tengserve_backend.errors import ConfigurationError
from tengserve_backend.repository.source import Progress

FORMAT = 1
"""Raised whenever a conversion would come out differently, so that older entries are not taken for new ones."""

LOCK_TIMEOUT_S = 900.0
"""How long to wait for another process that converts the same file. A large model takes minutes."""

Convert = Callable[[Path, Path, Progress], None]
"""Converts a GGUF file (first) into files in an empty folder (second)."""

_CHUNK_BYTES = 4 * 2**20


def converted(
    gguf: Path, root: Path, convert: Convert, progress: Progress, *, lock_timeout_s: float = LOCK_TIMEOUT_S
) -> Path:
    """The folder that `convert` makes of a GGUF file: from the cache, or made now; see `artifact`.

    Raises:
        ConfigurationError: the cache cannot be written, or another process converts for longer than the limit.
    """
    entry = root / "gguf" / f"{_sha256(gguf, progress)}-{FORMAT}"
    try:
        return artifact(
            entry,
            lambda folder: convert(gguf, folder, progress),
            lock_timeout_s=lock_timeout_s,
            waiting=lambda waited_s: progress(
                "waiting for another process that converts the weights", waited_s / lock_timeout_s
            ),
        )
    except ArtifactBusyError:
        raise ConfigurationError(
            f"another process has been converting the same weights for more than {lock_timeout_s:.0f} s: "
            f"end it, or start again when it is done"
        ) from None
    except OSError as error:
        raise ConfigurationError(
            f"the weights cache cannot be written ({error.strerror or type(error).__name__}): "
            f"set TENGSERVE_CACHE_DIR to a writable folder with enough space for the weights in float32"
        ) from error


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
