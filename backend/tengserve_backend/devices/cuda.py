"""An NVIDIA GPU, by the same portable code."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from tengserve_backend.devices.base import DeviceBackend
from tengserve_backend.errors import ConfigurationError
from tengserve_backend.execution.attention.portable import PortableAttention
from tengserve_backend.execution.attention.tier import AttentionNeeds, AttentionTier
from tengserve_backend.execution.sampling.greedy import greedy
from tengserve_backend.scheduling.budget import StepTokens

_CACHE_SHARE = 0.8


class CudaDevice:
    """See DeviceBackend.

    Args:
        index: which GPU.
    """

    def __init__(self, index: int) -> None:
        self.name = f"cuda:{index}"
        self.torch_device = torch.device("cuda", index)

    def upgrade(self) -> Future[DeviceBackend] | None:
        """Nothing is to come."""
        return None

    def default_dtype(self, checkpoint: torch.dtype) -> torch.dtype:
        """As stored, but bfloat16 for float32 weights where the GPU has it."""
        if checkpoint is torch.float32:
            return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
        return checkpoint

    def available_memory(self) -> int:
        """Free device memory."""
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def default_cache_memory(self) -> int:
        """Most of what the weights left."""
        return int(self.available_memory() * _CACHE_SHARE)

    def default_cache_tokens(self, longest: int) -> int | None:
        """As many as there is memory for: it is of no use to anybody else."""
        return None

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        """See DeviceBackend."""
        return greedy(logits)

    def default_step_tokens(self) -> StepTokens:
        """See DeviceBackend."""
        return StepTokens(2048, beside_streams=2048)

    def check_dtype(self, dtype: torch.dtype) -> None:
        """See DeviceBackend."""
        if dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported():
            raise ConfigurationError(f"dtype is bfloat16, which {self.name} does not compute in; use float16")

    def attention_tiers(self, needs: Collection[AttentionNeeds], dtype: torch.dtype) -> Sequence[AttentionTier]:
        """See DeviceBackend."""
        return [PortableAttention()]

    def fuse(self, model: Any, wanted: Collection[str]) -> Mapping[str, int]:
        """Nothing to fuse."""
        return {}

    def fuse_in_pieces(self, model: Any, run: Callable[[], object]) -> Generator[None, None, Mapping[str, int]]:
        """It is never an upgrade."""
        yield from ()
        return {}

    def measure_peak(self, run: Callable[[], None]) -> int:
        """See DeviceBackend."""
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        run()
        torch.cuda.synchronize(self.torch_device)
        peak = torch.cuda.max_memory_allocated(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        torch.cuda.empty_cache()
        return peak

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """See DeviceBackend. From pageable memory, so it returns when the copy is done."""
        return host.to(self.torch_device)

    def bind_thread(self) -> None:
        """Make it this thread's current device."""
        torch.cuda.set_device(self.torch_device)

    def is_out_of_memory(self, error: BaseException) -> bool:
        """See DeviceBackend."""
        return isinstance(error, torch.OutOfMemoryError)

    def is_fault(self, error: BaseException) -> bool:
        """See DeviceBackend. After such an error every call of the process's CUDA context fails."""
        return isinstance(error, torch.AcceleratorError) and not self.is_out_of_memory(error)

    def explain(self, error: BaseException) -> str:
        """See DeviceBackend. The error says it itself."""
        return ""

    def release_memory(self) -> None:
        """Empty torch's cache."""
        torch.cuda.empty_cache()
