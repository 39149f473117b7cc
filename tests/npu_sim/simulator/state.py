"""The knobs and counters of the simulated runtime: `struct sim_state` of runtime/sim.h, seen from Python.

Of this process, `own()`; of another one, `SharedState`, which owns the file that both map.
"""

from __future__ import annotations

import ctypes
import enum
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MAGIC = 0x4E50552D53494D31
_DEVICES = 8


class FaultPoint(enum.IntFlag):
    """Where an injected device fault shows."""

    SYNC = 1
    COPY = 2
    LAUNCH = 4


class State(ctypes.Structure):
    """Knobs (all may be set while the process runs) and counters (all may be zeroed)."""

    _fields_ = (
        ("magic", ctypes.c_int64),
        ("size", ctypes.c_int64),
        # Knobs.
        ("memory_bytes", ctypes.c_int64),
        ("defer_copies", ctypes.c_int64),
        ("malloc_passes", ctypes.c_int64),
        ("malloc_failures", ctypes.c_int64),
        ("fault_code", ctypes.c_int64),
        ("fault_points", ctypes.c_int64),
        ("fault_passes", ctypes.c_int64),
        # Counters.
        ("mallocs", ctypes.c_int64),
        ("malloc_refusals", ctypes.c_int64),
        ("launches", ctypes.c_int64),
        ("fallbacks", ctypes.c_int64),
        ("stream_syncs", ctypes.c_int64),
        ("device_syncs", ctypes.c_int64),
        ("event_syncs", ctypes.c_int64),
        ("copies", ctypes.c_int64 * 4),
        ("copied_bytes", ctypes.c_int64 * 4),
        ("deferred_copies", ctypes.c_int64),
        ("stub_calls", ctypes.c_int64),
        ("used_bytes", ctypes.c_int64 * _DEVICES),
        ("peak_bytes", ctypes.c_int64 * _DEVICES),
        ("last_fallback", ctypes.c_char * 128),
        ("last_stub", ctypes.c_char * 128),
    )

    memory_bytes: int
    """Of each device; lowered below what is in use, every further allocation fails."""
    defer_copies: int
    """1: an asynchronous copy runs as late as its stream allows; 0: at once."""
    malloc_passes: int
    malloc_failures: int
    """After `malloc_passes` more allocations, so many fail; negative: all. torch_npu frees its cache and tries again
    once, so that a single failure goes unnoticed."""
    fault_code: int
    fault_points: int
    fault_passes: int
    """After `fault_passes` more calls of these FaultPoints, every one returns the ACL code, until it is 0 again."""
    mallocs: int
    malloc_refusals: int
    launches: int
    """Kernels on the device."""
    fallbacks: int
    """Operators that ran on the host because the wheel has no kernel for them; the last one is `last_fallback`."""
    stream_syncs: int
    device_syncs: int
    event_syncs: int
    deferred_copies: int
    stub_calls: int
    """Calls of the runtime that the simulation does not know; the last one is `last_stub`."""

    @property
    def syncs(self) -> int:
        """How often the host waited for the device."""
        return self.stream_syncs + self.device_syncs + self.event_syncs

    @property
    def host_to_device(self) -> int:
        """Copies so far."""
        return int(self.copies[1])

    @property
    def device_to_host(self) -> int:
        """Copies so far, and reads that an operator does itself, such as the count in nonzero."""
        return int(self.copies[2])

    def reset_counters(self) -> None:
        """Zero every counter but the memory in use."""
        for name in (
            "mallocs",
            "malloc_refusals",
            "launches",
            "fallbacks",
            "stream_syncs",
            "device_syncs",
            "event_syncs",
        ):
            setattr(self, name, 0)
        for name in ("deferred_copies", "stub_calls"):
            setattr(self, name, 0)
        self.copies[:] = self.copied_bytes[:] = (0,) * 4
        self.peak_bytes[:] = self.used_bytes[:]
        self.last_fallback = self.last_stub = b""

    def break_device(self, code: int, points: FaultPoint | None = None, after: int = 0) -> None:
        """From now on, or after so many more calls, the device answers with an ACL code; 0 heals it."""
        self.fault_points = int(FaultPoint.SYNC | FaultPoint.COPY | FaultPoint.LAUNCH if points is None else points)
        self.fault_passes = after
        self.fault_code = code

    @contextmanager
    def no_more_memory(self) -> Iterator[None]:
        """Within it every further allocation fails; what torch_npu has in its cache can still be handed out."""
        before = self.memory_bytes
        self.memory_bytes = 0
        try:
            yield
        finally:
            self.memory_bytes = before


def own() -> State:
    """The state of this process.

    Raises:
        OSError: the simulation is off.
    """
    library = ctypes.CDLL("libascendcl.so")
    library.npu_sim_state.restype = ctypes.POINTER(State)
    state: State = library.npu_sim_state().contents
    if state.magic != _MAGIC or state.size != ctypes.sizeof(State):
        raise OSError("the simulated runtime and simulator/state.py do not fit each other")
    return state


class SharedState:
    """The state of a process that is not started yet: give it `environment`, then read and turn `state`."""

    def __init__(self, path: Path, memory_mib: int = 1024) -> None:
        """Make the file. All knobs are set here; the variables that set them in one process are not read.

        Args:
            path: a new file, in a folder that outlives the process.
            memory_mib: of each device.
        """
        path.write_bytes(bytes(ctypes.sizeof(State)))
        with path.open("r+b") as file:
            # The state keeps the mapping, which ends with it.
            self.state = State.from_buffer(mmap.mmap(file.fileno(), 0))
        self.state.size = ctypes.sizeof(State)
        self.state.memory_bytes = memory_mib << 20
        self.state.defer_copies = 1
        self.state.magic = _MAGIC
        self.environment = {"NPU_SIM_STATE": str(path)}
