"""Top-k, top-p and min-p as one number a row: the lowest logit that is kept.

Tokens with equal logits are kept or dropped together, by every filter. transformers does so for top-k and min-p; its
top-p drops some of several equal tokens at the border, by their place in a sort.

Only the largest logits of a row, its head, are put in order. No row is sorted as a whole unless its filters reach
that far.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from tengserve_backend.execution.sampling import sums
from tengserve_backend.execution.sampling.row import Columns
from tengserve_backend.generation.sampling import ResolvedSampling

_HEADS = (64, 1024, 8192)
_TOP_P_HEAD = 1024
_GROUP = 16


@dataclass(frozen=True, slots=True)
class Filters:
    """What the filters of a row have to look at. It follows from the row's own parameters, never from its batch.

    Attributes:
        head: how many of its largest logits; 0 where no order matters.
        top_p: whether there is a top_p, which needs probabilities.
    """

    head: int
    top_p: bool


def filters_of(sampling: ResolvedSampling, width: int) -> Filters:
    """The filters of a row of `width` logits."""
    top_p = sampling.top_p < 1.0
    needed = sampling.top_k or (_TOP_P_HEAD if top_p else 0)
    head = next((size for size in _HEADS if needed <= size < width), width) if needed else 0
    return Filters(head, top_p)


def wider(filters: Filters, width: int) -> Filters:
    """The same filters with the next longer head."""
    return replace(filters, head=next((size for size in _HEADS if filters.head < size < width), width))


def largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """The largest values of each row, descending.

    Args:
        values: [R, width], the width a multiple of 16.
        count: how many, up to the width.
    """
    if count == values.shape[-1]:
        return values.sort(dim=-1, descending=True).values
    # The n largest values lie in the n groups with the largest maxima; the other groups are read once and left alone.
    groups = values.view(values.shape[0], _GROUP, -1)
    if 4 * count <= groups.shape[-1]:
        chosen = groups.amax(dim=-2).topk(count, dim=-1).indices
        values = groups.gather(-1, chosen.unsqueeze(-2).expand(-1, _GROUP, -1)).flatten(-2)
    return values.topk(count, dim=-1).values


def lowest_kept(
    logits: torch.Tensor, maxima: torch.Tensor, probabilities: torch.Tensor, parameters: Columns, filters: Filters
) -> tuple[torch.Tensor, torch.Tensor]:
    """The limit of each row: top-k first, then top-p among what is left, then min-p.

    Args:
        logits: [R, width].
        maxima: [R, 1], of the logits.
        probabilities: [R, width], of the logits at the row's temperature, before any filter.
        parameters: of the rows.
        filters: of all these rows; a head of the whole width always suffices.

    Returns:
        limits: [R, 1]; tokens with at least this logit are kept, the most probable one always among them.
        found: bool [R, 1]; False where top-p reaches beyond the head, so that the limit is lower than this one.
    """
    limits = maxima - parameters.min_p_drops
    found = torch.ones_like(limits, dtype=torch.bool)
    if not filters.head:
        return limits, found
    top = largest(logits, filters.head)
    has_top_k = parameters.top_k > 0
    # A model may read more tokens than it has logits for, and so may a top_k be wider than the row.
    kth = torch.where(has_top_k, top.gather(-1, (parameters.top_k - 1).clamp(0, filters.head - 1)), -math.inf)
    if filters.top_p:
        # The softmax over the head alone, scaled to give its first token the probability that it has in the whole row.
        shares = torch.softmax((top - maxima) / parameters.temperatures, dim=-1)
        shares *= probabilities.amax(dim=-1, keepdim=True) / shares[:, :1]
        in_top_k = top >= kth
        running = sums.running(shares * in_top_k)
        # Others beyond the head may tie with the k-th. Counts are exact in float32, in whatever order they are made.
        kept = torch.ge(logits, kth, out=torch.empty_like(logits)).sum(dim=-1, keepdim=True)
        beyond = kept - in_top_k.sum(dim=-1, keepdim=True)
        mass = torch.where(has_top_k, running[:, -1:] + beyond * shares[:, -1:], 1.0)
        # A token stays while the more probable ones do not reach top_p.
        stays = sums.before(running) < parameters.top_p * mass
        limits = limits.maximum(torch.where(stays & in_top_k, top, math.inf).amin(dim=-1, keepdim=True))
        if filters.head < logits.shape[-1]:
            # What top-k keeps beyond the head only ties with the k-th, so there the limit is right in any case.
            found = has_top_k | (running[:, -1:] >= parameters.top_p)
    return limits.maximum(kth), found
