"""An NVIDIA GPU, by the same portable code."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import torch

from tengserve_backend.devices.accelerator import Accelerator
from tengserve_backend.errors import ConfigurationError
from tengserve_backend.execution.attention.portable import PortableAttention
from tengserve_backend.execution.attention.tier import AttentionNeeds, AttentionTier

_CACHE_SHARE: Final = 0.8


class CudaDevice(Accelerator):
    """See DeviceBackend.

    Args:
        index: which GPU.
    """

    def __init__(self, index: int) -> None:
        super().__init__("cuda", index, torch.cuda, cache_share=_CACHE_SHARE)

    def default_dtype(self, checkpoint: torch.dtype) -> torch.dtype:
        """As stored, but bfloat16 for float32 weights where the GPU has it."""
        if checkpoint is torch.float32:
            return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
        return checkpoint

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

    def is_out_of_memory(self, error: BaseException) -> bool:
        """See DeviceBackend."""
        return isinstance(error, torch.OutOfMemoryError)

    def is_fault(self, error: BaseException) -> bool:
        """See DeviceBackend. After such an error every call of the process's CUDA context fails."""
        return isinstance(error, torch.AcceleratorError) and not self.is_out_of_memory(error)

    def explain(self, error: BaseException) -> str:
        """See DeviceBackend. The error says it itself."""
        return ""
