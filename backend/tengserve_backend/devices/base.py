"""What an engine needs to know of a device; the code above sees plain torch besides."""

from __future__ import annotations

from typing import Protocol

import torch

from tengserve_backend.execution.attention.tier import AttentionTier


class DeviceBackend(Protocol):
    """One device of one kind."""

    @property
    def name(self) -> str:
        """As in the `device` setting, resolved: cpu, cuda:0."""
        ...

    @property
    def torch_device(self) -> torch.device:
        """Where tensors go."""
        ...

    def default_dtype(self, checkpoint: torch.dtype) -> torch.dtype:
        """What `dtype: auto` means here for weights stored in this dtype."""
        ...

    def available_memory(self) -> int:
        """Bytes that could be used now without hurting anybody, container limits included."""
        ...

    def default_cache_memory(self) -> int:
        """Bytes of KV cache at most when the operator set nothing, weights being loaded already."""
        ...

    def default_batched_tokens(self) -> int:
        """Tokens of a step when the operator set nothing: what keeps the gap between two tokens short."""
        ...

    def attention_tier(self) -> AttentionTier:
        """How attention is computed here."""
        ...

    def bind_thread(self) -> None:
        """Called once on the engine's thread before anything else."""
        ...

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether the device ran out of memory, so that a smaller batch may succeed."""
        ...

    def release_memory(self) -> None:
        """Give cached memory back after a model is gone."""
        ...
