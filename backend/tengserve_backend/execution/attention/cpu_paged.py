"""The CPU's own tier: one operator attends over the pages for all sequences of a step.

The memory of a block is the operator's to lay out: keys as [head, key_dim, token], so that one register holds as many
keys of a block; values as [head, token, value_dim].
"""

from __future__ import annotations

import torch

from tengserve_backend.execution.attention.tier import UNLIMITED, AttentionSpec
from tengserve_backend.execution.kv_tensors import LayerCache
from tengserve_backend.execution.packed_batch import PackedBatch
from tengserve_backend.native.operators import BLOCK_SIZE


class CpuPagedAttention:
    """See AttentionTier. The library of operators is loaded."""

    name = "cpu-paged"
    block_size = BLOCK_SIZE
    limits = UNLIMITED

    def __init__(self) -> None:
        self._write = torch.ops.tengserve_cpu.paged_write.default
        self._attention = torch.ops.tengserve_cpu.paged_attention.default

    def write(self, pages: LayerCache, batch: PackedBatch, key: torch.Tensor, value: torch.Tensor) -> None:
        """See AttentionTier."""
        self._write(key, value, pages.keys, pages.values, batch.slots, BLOCK_SIZE)

    def attend(self, query: torch.Tensor, pages: LayerCache, batch: PackedBatch, spec: AttentionSpec) -> torch.Tensor:
        """See AttentionTier."""
        attended: torch.Tensor = self._attention(
            query,
            pages.keys,
            pages.values,
            batch.block_table,
            batch.query_ends,
            batch.contexts,
            BLOCK_SIZE,
            spec.scaling,
            spec.window,
            spec.chunk,
            spec.softcap,
            spec.sinks,
        )
        return attended
