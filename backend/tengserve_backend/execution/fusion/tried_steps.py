"""Steps that show whether one way through a model gives the answer of another: by our attention, over pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tengserve_backend.execution.attention.registry import IMPLEMENTATION, StepContext, step_context
from tengserve_backend.execution.attention.tier import AttentionTier
from tengserve_backend.execution.kv_tensors import PagedKVCache
from tengserve_backend.execution.packed_batch import pack
from tengserve_backend.execution.snapshot import Snapshot
from tengserve_backend.scheduling.step import ScheduledSequence, Step


def _part(seq_id: int, start: int, count: int, blocks: tuple[int, ...]) -> ScheduledSequence:
    return ScheduledSequence(seq_id, start, tuple(range(1, count + 1)), blocks, samples=True)


# A prompt in chunks, the second of one token as in a decode, beside another one; blocks in no order.
_FIRST, _SECOND = (2, 0), (1,)
_TRIED = (
    Step(0, (_part(0, 0, 18, _FIRST), _part(1, 0, 3, _SECOND))),
    Step(1, (_part(0, 18, 1, _FIRST), _part(1, 3, 4, _SECOND))),
)
_TRIED_BLOCKS = 3


@torch.no_grad()
def run_in_pages(
    run: Callable[[StepContext], torch.Tensor], tier: AttentionTier, *, like: torch.Tensor
) -> torch.Tensor:
    """What something gives for the tried steps, one after the other, inside the context of each.

    Args:
        run: gives [1, rows, size] for a step.
        tier: how to attend.
        like: has the dtype and the device of keys and values.

    Returns:
        [1, rows of all steps, size].
    """
    cache = PagedKVCache(total_blocks=_TRIED_BLOCKS, block_size=tier.block_size, dtype=like.dtype, device=like.device)
    outputs = []
    for step in _TRIED:
        snapshot = Snapshot()
        batch = pack(step, snapshot, block_size=tier.block_size).on(snapshot.upload(lambda host: host))
        context = StepContext(batch=batch, cache=cache, tier=tier, chunks={})
        with step_context(context):
            outputs.append(run(context))
    return torch.cat(outputs, 1)


def logits_in_pages(model: Any, tier: AttentionTier, *, of_all: bool = True) -> torch.Tensor:
    """What a model whose attention is ours gives for the tried steps.

    Args:
        model: of transformers.
        tier: how to attend.
        of_all: the logits of all tokens, else of those that are sampled.
    """

    def run(context: StepContext) -> torch.Tensor:
        batch = context.batch
        wanted = {} if of_all else {"logits_to_keep": batch.logit_rows}
        logits: torch.Tensor = model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=None,
            use_cache=False,
            **wanted,
        ).logits
        return logits

    return run_in_pages(run, tier, like=next(model.parameters()))


def takes_our_attention(model: Any) -> bool:
    """Whether transformers lets a model attend by a function of the registry."""
    can = getattr(type(model), "_can_set_attn_implementation", None)
    return can is not None and bool(can())


@contextmanager
def our_attention(model: Any) -> Iterator[None]:
    """The model's attention is the registry's inside."""
    before = model.config._attn_implementation
    model.set_attn_implementation(IMPLEMENTATION)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
