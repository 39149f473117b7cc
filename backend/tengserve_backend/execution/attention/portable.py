"""The portable tier: plain torch operators on any device, and the oracle of every faster tier.

Each sequence is gathered from its pages and attended alone, so an answer cannot depend on its neighbours.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from tengserve_backend.execution.attention.tier import AttentionSpec
from tengserve_backend.execution.kv_tensors import LayerCache
from tengserve_backend.execution.packed_batch import Span


class PortableAttention:
    """See AttentionTier."""

    name = "portable"
    block_size = 16

    def attend(
        self, query: torch.Tensor, pages: LayerCache, spans: tuple[Span, ...], spec: AttentionSpec
    ) -> torch.Tensor:
        """See AttentionTier."""
        total, heads = query.shape[1], query.shape[0]
        out = query.new_empty((total, heads, pages.values.shape[2]))
        for span in spans:
            first = 0
            if spec.window is not None:
                # Keys before the first query's window are seen by nobody.
                first = max(0, span.context - span.count - spec.window + 1)
            slots = span.slots[first:]
            rows = slice(span.offset, span.offset + span.count)
            keys = pages.keys.index_select(0, slots).transpose(0, 1)
            values = pages.values.index_select(0, slots).transpose(0, 1)
            out[rows] = _attend_one(query[:, rows], keys, values, spec).transpose(0, 1)
        return out


def _attend_one(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """Attention of one sequence's last queries.

    Args:
        query: [query heads, n, key_dim]; the last n of the L positions.
        keys: [kv heads, L, key_dim].
        values: [kv heads, L, value_dim].

    Returns:
        [query heads, n, value_dim].
    """
    heads, count, _ = query.shape
    kv_heads, length, value_dim = values.shape
    mask = None if count == 1 else _causal_mask(count, length, spec.window, query.device)
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


def _causal_mask(count: int, length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """bool [count, length]: True where the query, one of the last `count` positions, sees the key."""
    queries = torch.arange(length - count, length, device=device).unsqueeze(1)
    keys = torch.arange(length, device=device).unsqueeze(0)
    mask = keys <= queries
    return mask if window is None else mask & (keys > queries - window)
