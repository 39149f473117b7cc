"""The portable tier: plain torch operators on any device, and the oracle of every faster tier.

Each sequence is gathered from its pages and attended alone, so an answer cannot depend on its neighbours.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from tengserve_backend.execution.attention.tier import UNLIMITED, AttentionSpec
from tengserve_backend.execution.kv_tensors import LayerCache
from tengserve_backend.execution.packed_batch import PackedBatch, Span


class PortableAttention:
    """See AttentionTier.

    Args:
        block_size: tokens a block.
    """

    name = "portable"
    limits = UNLIMITED

    def __init__(self, block_size: int = 16) -> None:
        self.block_size = block_size

    def write(self, pages: LayerCache, batch: PackedBatch, key: torch.Tensor, value: torch.Tensor) -> None:
        """See AttentionTier."""
        pages.keys.index_copy_(0, batch.slots, key)
        pages.values.index_copy_(0, batch.slots, value)

    def attend(self, query: torch.Tensor, pages: LayerCache, batch: PackedBatch, spec: AttentionSpec) -> torch.Tensor:
        """See AttentionTier."""
        out = query.new_empty((query.shape[1], query.shape[0], pages.values.shape[2]))
        for index, span in enumerate(batch.spans):
            first = _first_key(span.context - span.count, spec)
            rows = slice(span.offset, span.offset + span.count)
            slots = batch.context_slots(index)[first:]
            keys = pages.keys.index_select(0, slots).transpose(0, 1)
            values = pages.values.index_select(0, slots).transpose(0, 1)
            mask = None if span.count == 1 else _causal_mask(span, first, spec, query.device)
            out[rows] = _attend_one(query[:, rows], keys, values, mask, spec).transpose(0, 1)
        return out


def _attend_one(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, spec: AttentionSpec
) -> torch.Tensor:
    """Attention of one sequence's last queries.

    Args:
        query: [query heads, n, key_dim]; the last n of the L positions.
        keys: [kv heads, L, key_dim].
        values: [kv heads, L, value_dim].
        mask: bool [n, L], True where a query sees a key; None when all do.

    Returns:
        [query heads, n, value_dim].
    """
    heads, count, _ = query.shape
    kv_heads, _, value_dim = values.shape
    if spec.softcap is not None or spec.sinks is not None:
        return _attend_explicitly(query, keys, values, mask, spec)
    if count == 1 and heads != kv_heads:
        # Query heads of a group become rows, so no key is repeated.
        grouped = query.reshape(kv_heads, heads // kv_heads, -1)
        attended = functional.scaled_dot_product_attention(
            grouped.unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), scale=spec.scaling
        )
        return attended.reshape(heads, 1, value_dim)
    return functional.scaled_dot_product_attention(
        query.unsqueeze(0),
        keys.unsqueeze(0),
        values.unsqueeze(0),
        attn_mask=mask,
        scale=spec.scaling,
        enable_gqa=heads != kv_heads,
    ).squeeze(0)


def _attend_explicitly(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, spec: AttentionSpec
) -> torch.Tensor:
    """The same with scores in the open, for what SDPA has no argument for."""
    heads, count, _ = query.shape
    group = heads // keys.shape[0]
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    scores = (query @ keys.transpose(1, 2)) * spec.scaling
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if spec.sinks is not None:
        sinks = spec.sinks.to(scores.dtype).reshape(heads, 1, 1).expand(heads, count, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return weights[..., : keys.shape[1]] @ values


def _first_key(position: int, spec: AttentionSpec) -> int:
    """The first key that a query at this position sees; nobody after it sees an earlier one."""
    first = 0
    if spec.window is not None:
        first = max(first, position - spec.window + 1)
    if spec.chunk is not None:
        first = max(first, position // spec.chunk * spec.chunk)
    return first


def _causal_mask(span: Span, first: int, spec: AttentionSpec, device: torch.device) -> torch.Tensor:
    """bool [count, context - first]: True where the query sees the key."""
    queries = torch.arange(span.context - span.count, span.context, device=device).unsqueeze(1)
    keys = torch.arange(first, span.context, device=device).unsqueeze(0)
    mask = keys <= queries
    if spec.window is not None:
        mask &= keys > queries - spec.window
    if spec.chunk is not None:
        mask &= keys // spec.chunk == queries // spec.chunk
    return mask
