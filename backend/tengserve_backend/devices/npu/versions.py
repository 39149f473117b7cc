"""Which torch, torch-npu and CANN are installed, read from their own files: nothing is imported.

The three belong together. A torch-npu is built for one minor version of torch and for one line of CANN; with another
torch its libraries miss symbols, which ends in an error that names none of the two, or in no error at all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

_MINOR = re.compile(r"\d+\.\d+")
_CANN_VERSION = re.compile(r"^\s*version\s*=\s*([^\s\[\]]{1,40})\s*$", re.IGNORECASE | re.MULTILINE)
_CANN_FILES = (
    "ascend_toolkit_install.info",
    "*-linux/ascend_toolkit_install.info",
    "*-linux/ascend_*_install.info",
    "ascend_*_install.info",
    "compiler/version.info",
    "runtime/version.info",
    "opp/version.info",
)
"""Where CANN keeps its version below ASCEND_HOME_PATH; the place has moved between its releases."""
_MAX_FILE_CHARS = 4096


@dataclass(frozen=True, slots=True)
class Versions:
    """What is installed; "" for what is not, or does not say.

    Attributes:
        torch, torch_npu, cann: as each of them writes its version.
    """

    torch: str
    torch_npu: str
    cann: str

    def __str__(self) -> str:
        """For the log and for reports."""
        return f"torch {self.torch or 'none'}, torch-npu {self.torch_npu or 'none'}, CANN {self.cann or 'unknown'}"

    @property
    def disagreement(self) -> str:
        """One sentence when torch and torch-npu do not belong together, else ""."""
        wanted, found = _minor(self.torch_npu), _minor(self.torch)
        if not wanted or not found or wanted == found:
            return ""
        return (
            f"torch-npu {self.torch_npu} is built for torch {wanted}, and torch {self.torch} is installed: install "
            f"torch=={wanted}.*, or the torch-npu of torch {found}"
        )


def installed_versions(environ: Mapping[str, str]) -> Versions:
    """The versions of this environment."""
    return Versions(_distribution("torch"), _distribution("torch-npu"), _cann(environ.get("ASCEND_HOME_PATH", "")))


def _distribution(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _cann(home: str) -> str:
    if not home:
        return ""
    for pattern in _CANN_FILES:
        for file in sorted(Path(home).glob(pattern)):
            try:
                text = file.read_text(encoding="utf-8", errors="replace")[:_MAX_FILE_CHARS]
            except OSError:
                continue
            if found := _CANN_VERSION.search(text):
                return found[1]
    return ""


def _minor(version: str) -> str:
    found = _MINOR.match(version)
    return found[0] if found else ""
