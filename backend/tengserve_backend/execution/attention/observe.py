"""What a model asks of attention, seen while it runs: configurations do not always tell, or not in the same words."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tengserve_backend.execution.attention.tier import AttentionNeeds, AttentionSpec, AttentionTier
from tengserve_backend.execution.kv_tensors import LayerCache
from tengserve_backend.execution.packed_batch import PackedBatch


class ObservedAttention:
    """A tier that remembers what was asked of it. See AttentionTier.

    Args:
        tier: that does the work.
    """

    def __init__(self, tier: AttentionTier) -> None:
        self._tier = tier
        self.name = tier.name
        self.block_size = tier.block_size
        self.limits = tier.limits
        self._seen: list[tuple[int, AttentionSpec, LayerCache]] = []

    def write(self, pages: LayerCache, batch: PackedBatch, key: torch.Tensor, value: torch.Tensor) -> None:
        """See AttentionTier."""
        self._tier.write(pages, batch, key, value)

    def attend(self, query: torch.Tensor, pages: LayerCache, batch: PackedBatch, spec: AttentionSpec) -> torch.Tensor:
        """See AttentionTier."""
        self._seen.append((query.shape[0], spec, pages))
        return self._tier.attend(query, pages, batch, spec)

    @property
    def calls(self) -> Sequence[tuple[int, AttentionSpec, LayerCache]]:
        """Query heads, what was asked and the pages, call by call."""
        return self._seen

    def needs(self) -> frozenset[AttentionNeeds]:
        """One entry a kind of layer."""
        return frozenset(
            AttentionNeeds(
                query_heads=heads,
                kv_heads=pages.keys.shape[1],
                key_dim=pages.keys.shape[2],
                value_dim=pages.values.shape[2],
                window=spec.window,
                softcap=spec.softcap is not None,
                sinks=spec.sinks is not None,
                chunks=spec.chunk is not None,
            )
            for heads, spec, pages in self._seen
        )
