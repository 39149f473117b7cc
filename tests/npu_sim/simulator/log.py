"""Which operators ran on the simulated device, in all threads, and which of them the wheel has no kernel for."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class OperatorLog:
    """What ran while it was open: full names such as "aten::add.Tensor", with counts."""

    native: Counter[str] = field(default_factory=Counter)
    """Operators with a kernel for the device. What is composed of others shows as these others."""
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Operators without one, which torch_npu runs on the host, silently."""
    host_reads: Counter[str] = field(default_factory=Counter)
    """Operators that make the host wait for a value, such as nonzero or a boolean index."""


_lock = threading.Lock()
_open: list[OperatorLog] = []


@contextmanager
def record() -> Iterator[OperatorLog]:
    """Log every operator of every thread of this process until the end of the block."""
    log = OperatorLog()
    with _lock:
        _open.append(log)
    try:
        yield log
    finally:
        with _lock:
            _open.remove(log)


def note_native(name: str) -> None:
    """An operator ran on the device."""
    if _open:
        with _lock:
            for log in _open:
                log.native[name] += 1


def note_fallback(name: str) -> None:
    """An operator ran on the host in place of the device."""
    if _open:
        with _lock:
            for log in _open:
                log.fallbacks[name] += 1


def note_host_read(name: str) -> None:
    """An operator read something back."""
    if _open:
        with _lock:
            for log in _open:
                log.host_reads[name] += 1
