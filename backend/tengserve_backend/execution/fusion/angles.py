"""Angles of rotary embeddings, looked up by position.

A model's module computes cosines and sines anew in each step, by eight operators and as many checks. Where they follow
from the position alone, the module's own answers are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from tengserve_backend.execution.packed_batch import PackedBatch

_MOST_BYTES: Final = 4 << 20
_FOR_ALL: Final = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds whose frequencies stay as they are; those of others change with the length of what is computed together."""

# Positions that are computed once more, in two other groupings.
_APART = 16

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosine and sine, each [1, T, elements of a head]."""


class AngleLookup:
    """A rotary module in the steps of a model.

    Args:
        module: of transformers: hidden states and position_ids to Angles.
        hidden: has the dtype of hidden states, [1, ..., size].
        positions: that the model is made for.
    """

    def __init__(self, module: Callable[..., Angles], hidden: torch.Tensor, positions: int) -> None:
        self._module = module
        self._known = 0
        table = _table(module, hidden, positions)
        if table is not None:
            self._cos, self._sin = table
            self._known = len(self._cos)

    def __call__(self, hidden: torch.Tensor, batch: PackedBatch) -> Angles:
        """Of the tokens of a step, [1, T, size]."""
        if max(batch.contexts) <= self._known:
            return torch.embedding(self._cos, batch.position_ids), torch.embedding(self._sin, batch.position_ids)
        return self._module(hidden, position_ids=batch.position_ids)


@torch.no_grad()
def _table(module: Callable[..., Angles], hidden: torch.Tensor, positions: int) -> Angles | None:
    """Cosines and sines [positions, elements], the first few megabytes of them; None where a table is not right."""
    if getattr(module, "rope_type", None) not in _FOR_ALL:
        return None

    def angles(ids: torch.Tensor) -> Angles:
        cos, sin = module(hidden, position_ids=ids.unsqueeze(0))
        return cos[0], sin[0]

    row_bytes = sum(each.nbytes for each in angles(torch.arange(1)))
    cos, sin = angles(torch.arange(min(positions, _MOST_BYTES // row_bytes)))
    every = torch.arange(0, len(cos), max(1, len(cos) // _APART))
    again = [every.flip(0), *every.unsqueeze(1)]
    for ids in again:
        if not all(torch.equal(got, kept[ids]) for got, kept in zip(angles(ids), (cos, sin), strict=True)):
            return None
    return cos.contiguous(), sin.contiguous()
