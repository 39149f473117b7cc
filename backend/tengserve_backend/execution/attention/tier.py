"""What every attention tier is: a way to attend over pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from tengserve_backend.execution.kv_tensors import LayerCache
from tengserve_backend.execution.packed_batch import PackedBatch


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What a model asks of one attention call, as transformers passes it.

    Attributes:
        scaling: factor of the scores; always given by the model, never derived from the head size.
        window: a query sees this many keys, itself included; None sees all before it.
        chunk: a query sees keys of its own chunk of this many positions only; None has no chunks.
        softcap: scores are softcap * tanh(score / softcap); None leaves them.
        sinks: [query heads]; one more score a head in the softmax that no value belongs to; None has none.
    """

    scaling: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """What one kind of a model's layers asks of attention; a tier that cannot serve it says so before it is tried.

    Attributes:
        query_heads, kv_heads: of a layer.
        key_dim, value_dim: elements a head.
        window: see AttentionSpec.
        softcap, sinks, chunks: whether the layers have them, see AttentionSpec.
    """

    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    softcap: bool = False
    sinks: bool = False
    chunks: bool = False


@dataclass(frozen=True, slots=True)
class TierLimits:
    """What one call of a tier takes at most; None where there is no limit.

    Attributes:
        sequences: in a step.
        context: tokens of a sequence that decodes.
    """

    sequences: int | None = None
    context: int | None = None


UNLIMITED = TierLimits()


class AttentionTier(Protocol):
    """One way to keep keys and values and to attend over them. The block size belongs to it: its kernels read pages."""

    @property
    def name(self) -> str:
        """For the log and the metadata."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        ...

    @property
    def limits(self) -> TierLimits:
        """What a load with larger settings is refused for: it would fail under the load that it was made for."""
        ...

    def write(self, pages: LayerCache, batch: PackedBatch, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store the new tokens of one layer.

        Args:
            pages: the layer's cache.
            batch: the step.
            key: [T, kv heads, key_dim], in the cache's dtype.
            value: [T, kv heads, value_dim], in the cache's dtype.
        """
        ...

    def attend(self, query: torch.Tensor, pages: LayerCache, batch: PackedBatch, spec: AttentionSpec) -> torch.Tensor:
        """Causal attention of packed queries over their own sequences' pages.

        Args:
            query: [query heads, T, key_dim].
            pages: the layer's cache, the new tokens' keys and values included.
            batch: the step.
            spec: the model's wishes.

        Returns:
            [T, query heads, value_dim].
        """
        ...
