"""How much memory a KV cache may take, as an operator writes it."""

from __future__ import annotations

import re
from dataclasses import dataclass

_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,3})?)(KiB|MiB|GiB|TiB)", re.ASCII)
_FRACTION = re.compile(r"0?\.\d{1,6}", re.ASCII)


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """How much memory the KV cache may take; both None leaves it to the engine.

    Attributes:
        bytes: exactly so many bytes.
        fraction: this share of the memory that is available once the weights are loaded, in (0, 1).
    """

    bytes: int | None = None
    fraction: float | None = None


AUTO_MEMORY = MemoryBudget()
"""The engine decides."""


def parse_memory(text: str) -> MemoryBudget:
    """What a text says: auto, a size with its unit, or a fraction.

    Raises:
        ValueError: it is none of these.
    """
    if text == "auto":
        return AUTO_MEMORY
    if size := _SIZE.fullmatch(text):
        count = int(float(size[1]) * _UNITS[size[2]])
        if count > 0:
            return MemoryBudget(bytes=count)
    elif _FRACTION.fullmatch(text) and float(text) > 0:
        return MemoryBudget(fraction=float(text))
    raise ValueError
