"""Greedy choice: a row's largest logit, the first of equal ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Final

import torch

Greedy = Callable[[torch.Tensor], torch.Tensor]
"""Logits [R, vocabulary] to token ids, int64 [R]; UNUSABLE for a row whose largest is not finite, or that has a NaN."""

UNUSABLE: Final = -1

_CHUNK = 1024


def usable(tokens: Iterable[int]) -> list[int | None]:
    """What Greedy gave, once it is read: None for UNUSABLE."""
    return [None if token == UNUSABLE else token for token in tokens]


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """See Greedy. By torch's own kernel, which finds values and places at once."""
    maxima, tokens = logits.max(dim=-1)
    return torch.where(torch.isfinite(maxima), tokens, UNUSABLE)


def greedy_by_chunks(logits: torch.Tensor) -> torch.Tensor:
    """See Greedy. For a CPU.

    There torch's kernel that tells where the maximum is takes several times as long as the one that does not. So the
    latter finds the chunks' maxima, and the other one looks at these and at one chunk a row.
    """
    width = logits.shape[-1]
    chunk = math.gcd(width, _CHUNK)
    if chunk < _CHUNK // 16:
        # max, not argmax: it gives the value as well, and is the faster kernel.
        return greedy(logits)
    chunks = logits.view(len(logits), -1, chunk)
    first = chunks.amax(dim=-1).max(dim=-1).indices
    maxima, places = chunks[torch.arange(len(logits)), first].max(dim=-1)
    return torch.where(torch.isfinite(maxima), first * chunk + places, UNUSABLE)
