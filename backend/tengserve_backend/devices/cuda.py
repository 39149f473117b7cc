"""An NVIDIA GPU, by the same portable code."""

from __future__ import annotations

import torch

from tengserve_backend.execution.attention.portable import PortableAttention
from tengserve_backend.execution.attention.tier import AttentionTier

_CACHE_SHARE = 0.8


class CudaDevice:
    """See DeviceBackend.

    Args:
        index: which GPU.
    """

    def __init__(self, index: int) -> None:
        self.name = f"cuda:{index}"
        self.torch_device = torch.device("cuda", index)

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

    def default_batched_tokens(self) -> int:
        """See DeviceBackend."""
        return 2048

    def attention_tier(self) -> AttentionTier:
        """See DeviceBackend."""
        return PortableAttention()

    def bind_thread(self) -> None:
        """Make it this thread's current device."""
        torch.cuda.set_device(self.torch_device)

    def is_out_of_memory(self, error: BaseException) -> bool:
        """See DeviceBackend."""
        return isinstance(error, torch.OutOfMemoryError)

    def release_memory(self) -> None:
        """Empty torch's cache."""
        torch.cuda.empty_cache()
