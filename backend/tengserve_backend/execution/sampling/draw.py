"""One token a row at one uniform number, by the inverse of the cumulative distribution in the vocabulary's order.

In this order a small change of the logits moves the borders between tokens a little and swaps nothing. Two levels, the
sums of chunks and then one chunk, keep the rounding of float32 small and the work low.
"""

from __future__ import annotations

import torch

from tengserve_backend.execution.sampling import sums

CHUNK = 512
"""The width of a row must be a multiple of this, a power of two."""


def draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Choose tokens. A token without weight is never chosen.

    Args:
        weights: float32 [R, width], not negative, some positive in each row; their sum does not matter.
        uniforms: float32 [R, 1], in [0, 1].

    Returns:
        int64 [R].
    """
    chunks = weights.view(weights.shape[0], -1, CHUNK)
    masses = sums.total(chunks)
    ends = sums.running(masses)
    targets = uniforms * ends[:, -1:]
    chunk = _first_past(ends, masses, targets)
    inside = chunks.gather(1, chunk.unsqueeze(-1).expand(-1, -1, CHUNK)).squeeze(1)
    targets = targets - sums.before(ends).gather(1, chunk)
    place = _first_past(sums.running(inside), inside, targets)
    return (chunk * CHUNK + place).squeeze(1)


def _first_past(ends: torch.Tensor, weights: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The first entry with a weight whose running sum is past the target; the last one when rounding leaves none."""
    places = torch.arange(weights.shape[-1], device=weights.device)
    weighted = weights > 0
    last = torch.where(weighted, places, 0).amax(dim=-1, keepdim=True)
    return torch.where(weighted & (ends > targets), places, last).amin(dim=-1, keepdim=True)
