"""How unmodified transformers models reach our attention: one function in transformers' attention registry.

Models call it with the new tokens' query, key and value. What it needs besides (pages, slots, spans) is in a step
context that the runner sets around the forward: a context variable, so each engine's thread has its own. No mask
function is registered under the name, so transformers builds no mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface

from tengserve_backend.execution.attention.tier import AttentionSpec, AttentionTier
from tengserve_backend.execution.kv_tensors import LayerShape, PagedKVCache
from tengserve_backend.execution.packed_batch import PackedBatch

# Not "flash" (taken for flash attention), no "/" (a hub kernel), no "paged|" prefix (transformers' own batching).
IMPLEMENTATION = "tengserve_pages"


@dataclass(frozen=True, slots=True)
class StepContext:
    """What the attention function reads.

    Attributes:
        batch: the step.
        cache: the engine's pages.
        tier: how to attend.
        chunks: attention chunk size by layer, for the layers that have one.
        layers: indices of the layers called so far in this step; each is called once.
    """

    batch: PackedBatch
    cache: PagedKVCache
    tier: AttentionTier
    chunks: Mapping[int, int]
    layers: set[int] = field(default_factory=set)

    def enter_layers(self, indices: Iterable[int]) -> None:
        """Remember layers that are called now.

        Raises:
            RuntimeError: one was called before.
        """
        for index in indices:
            if index in self.layers:
                raise RuntimeError(f"attention layer {index} was called twice in one step")
            self.layers.add(index)


_context: ContextVar[StepContext] = ContextVar("tengserve_step")


@contextmanager
def step_context(context: StepContext) -> Iterator[None]:
    """Make the context current for the forward inside the block."""
    token = _context.set(context)
    try:
        yield
    finally:
        _context.reset(token)


def current_context() -> StepContext | None:
    """Of the step that runs here, if one does."""
    return _context.get(None)


def _attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer over one packed row.

    Args:
        module: the layer; its `layer_idx` names the pages.
        query: [1, query heads, T, key_dim], after rotary embedding.
        key, value: [1, kv heads, T, dim], the new tokens only.
        attention_mask: always None here.
        scaling, sliding_window, softcap, s_aux: see AttentionSpec.

    Returns:
        [1, T, query heads, value_dim], and no weights.
    """
    context = _context.get()
    layer_idx = int(module.layer_idx)  # type: ignore[arg-type]  # torch types every module attribute as Tensor | Module
    context.enter_layers((layer_idx,))
    keys, values = key.squeeze(0).transpose(0, 1), value.squeeze(0).transpose(0, 1)
    pages = context.cache.layer(layer_idx, LayerShape(keys.shape[1], keys.shape[2], values.shape[2]))
    context.tier.write(pages, context.batch, keys.to(pages.keys.dtype), values.to(pages.values.dtype))
    spec = AttentionSpec(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        chunk=context.chunks.get(layer_idx),
        softcap=softcap,
        sinks=s_aux,
    )
    return context.tier.attend(query.squeeze(0), pages, context.batch, spec).unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, _attention_forward)
