"""The fused tier: one operator attends over the pages for all sequences of a step, prompts and decodes together."""

from __future__ import annotations

from functools import cache

import torch

from tengserve_backend.devices.npu import operators
from tengserve_backend.devices.npu.family import NpuFamily
from tengserve_backend.devices.npu.operators import Capabilities, Operator
from tengserve_backend.execution.attention.tier import AttentionNeeds, AttentionSpec, TierLimits
from tengserve_backend.execution.kv_tensors import LayerCache
from tengserve_backend.execution.packed_batch import PackedBatch

_FAMILIES = (NpuFamily.ATLAS_A2, NpuFamily.ATLAS_A3)
_BLOCK_SIZE = 128


class FusedPagedAttention:
    """See AttentionTier.

    Args:
        device: an NPU.
    """

    name = "npu-fused"
    # Prefill takes multiples of 128 to 512, decode multiples of 16, and 128 is what everybody runs.
    block_size = _BLOCK_SIZE
    limits = TierLimits(sequences=operators.MAX_BATCH, context=operators.MAX_DECODE_CONTEXT)

    def __init__(self, device: torch.device) -> None:
        self._mask = _shared_mask(device)

    def write(self, pages: LayerCache, batch: PackedBatch, key: torch.Tensor, value: torch.Tensor) -> None:
        """See AttentionTier."""
        operators.scatter_cache(
            key.contiguous(),
            value.contiguous(),
            pages.keys.view(-1, _BLOCK_SIZE, *pages.keys.shape[1:]),
            pages.values.view(-1, _BLOCK_SIZE, *pages.values.shape[1:]),
            slots=batch.slots32,
        )

    def attend(self, query: torch.Tensor, pages: LayerCache, batch: PackedBatch, spec: AttentionSpec) -> torch.Tensor:
        """See AttentionTier."""
        heads, dim = pages.keys.shape[1:]
        return operators.attention(
            query.transpose(0, 1).contiguous(),
            pages.keys.view(-1, _BLOCK_SIZE, heads * dim),
            pages.values.view(-1, _BLOCK_SIZE, heads * pages.values.shape[2]),
            mask=self._mask,
            query_ends=batch.query_ends,
            contexts=batch.contexts,
            block_table=batch.block_table,
            kv_heads=heads,
            scaling=spec.scaling,
            window=spec.window,
        )


def why_not(needs: AttentionNeeds, *, family: NpuFamily, dtype: torch.dtype, found: Capabilities) -> str:
    """Why the fused tier cannot serve one kind of layer: one clause, or "" when it can.

    Args:
        needs: the kind.
        family: of the chip.
        dtype: that the model computes in.
        found: what the installed torch-npu has.
    """
    if family not in _FAMILIES:
        return f"{family.value} has no fused paged attention"
    for wanted in (Operator.ATTENTION, Operator.SCATTER_CACHE):
        if wanted not in found.available:
            return f"{wanted.value}: {found.missing[wanted]}"
    if needs.key_dim != needs.value_dim:
        return f"head dim must be the same for keys and values, not {needs.key_dim} and {needs.value_dim}"
    if reason := operators.attention_rule(needs.query_heads, needs.kv_heads, needs.key_dim, dtype):
        return reason
    for asked, what in ((needs.softcap, "soft-capped scores"), (needs.sinks, "sinks"), (needs.chunks, "chunks")):
        if asked:
            return f"it has no {what}"
    return ""


@cache
def _shared_mask(device: torch.device) -> torch.Tensor:
    """4 MiB that all layers of all models on a device read."""
    return operators.causal_mask(device)
