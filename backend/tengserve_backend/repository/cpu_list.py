"""A set of CPUs as Linux writes it: numbers and ranges, such as 0-3,8."""

from __future__ import annotations

import re

MAX_CPU = 4095
"""The largest number that a list takes; Linux itself knows 8192 CPUs at most."""

_PART = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?", re.ASCII)


def parse_cpus(text: str) -> frozenset[int]:
    """The CPUs of a list.

    Raises:
        ValueError: it is none.
    """
    cpus: set[int] = set()
    for part in text.split(","):
        found = _PART.fullmatch(part)
        if found is None:
            raise ValueError
        first, last = int(found[1]), int(found[2] or found[1])
        if not first <= last <= MAX_CPU:
            raise ValueError
        cpus.update(range(first, last + 1))
    return frozenset(cpus)


def write_cpus(cpus: frozenset[int]) -> str:
    """The list of some CPUs, ascending, with ranges."""
    parts: list[str] = []
    for cpu in sorted(cpus):
        if cpu - 1 not in cpus:
            first = cpu
        if cpu + 1 not in cpus:
            parts.append(str(cpu) if cpu == first else f"{first}-{cpu}")
    return ",".join(parts)
