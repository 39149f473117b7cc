"""The CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from tengserve_backend.execution.attention.portable import PortableAttention
from tengserve_backend.execution.attention.tier import AttentionNeeds, AttentionTier

_CGROUP = Path("/sys/fs/cgroup")
_CACHE_SHARE = 0.25


class CpuDevice:
    """See DeviceBackend."""

    name = "cpu"
    torch_device = torch.device("cpu")

    def default_dtype(self, checkpoint: torch.dtype) -> torch.dtype:
        """float32: exact everywhere. A half-precision dtype is the operator's choice."""
        return torch.float32

    def available_memory(self) -> int:
        """Free memory of the machine or of the container, whichever is less."""
        available = int(psutil.virtual_memory().available)
        limit, used = _cgroup_number("memory.max"), _cgroup_number("memory.current")
        if limit is not None and used is not None:
            available = min(available, max(0, limit - used))
        return available

    def default_cache_memory(self) -> int:
        """A quarter of what is available: other models and other programs live here too."""
        return int(self.available_memory() * _CACHE_SHARE)

    def default_batched_tokens(self) -> int:
        """See DeviceBackend.

        A prompt token costs 1 to 2 ms on two cores with a small model, so a step with a chunk of a prompt takes two to
        three times as long as one without; `scripts/bench injection` measures it. Twice as many made it
        about four times.
        """
        return 64

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Any: torch computes in all of them here."""

    def attention_tiers(self, needs: Collection[AttentionNeeds], dtype: torch.dtype) -> Sequence[AttentionTier]:
        """See DeviceBackend."""
        return [PortableAttention()]

    def fuse(self, model: Any, wanted: Collection[str]) -> Sequence[str]:
        """Nothing to fuse."""
        return []

    def measure_peak(self, run: Callable[[], None]) -> int:
        """Not asked: activations come out of the share that the cache leaves."""
        return 0

    def bind_thread(self) -> None:
        """Nothing to bind."""

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """It is there."""
        return host

    def is_out_of_memory(self, error: BaseException) -> bool:
        """See DeviceBackend. torch's CPU allocator raises a plain RuntimeError."""
        return isinstance(error, MemoryError) or (
            isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
        )

    def is_fault(self, error: BaseException) -> bool:
        """A CPU that is lost takes the process along."""
        return False

    def explain(self, error: BaseException) -> str:
        """See DeviceBackend. The error says it itself."""
        return ""

    def release_memory(self) -> None:
        """Give the C library's free pages back to the system: tens of megabytes, in a millisecond or two."""
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's own; musl and others have none.
        if trim is not None:
            trim(0)


def _cgroup_number(name: str) -> int | None:
    """A control group's limit or use in bytes; None when there is none, or it says "max"."""
    try:
        return int((_CGROUP / name).read_text())
    except (OSError, ValueError):
        return None
