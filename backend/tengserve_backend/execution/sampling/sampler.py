"""Logits to token ids, in float32 and on any device, without torch's random numbers, float64 or a sort of integers.

Order of the rules: biases, repetition penalty (prompt and output), presence and frequency penalty (output),
temperature, top-k, top-p, min-p; then the inverse of the cumulative distribution at one uniform number. A row's answer
depends on its own logits, parameters and uniform number only, bit for bit: rows that take the same path are computed
together, and the path follows from the row's parameters. Greedy rows take the maximum and nothing else.

The host reads the device once. Only where a row's top-p reached beyond the largest logits that were looked at, the row
is done again with more of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tengserve_backend.execution.sampling.adjust import adjust
from tengserve_backend.execution.sampling.draw import CHUNK, draw
from tengserve_backend.execution.sampling.filters import Filters, filters_of, lowest_kept, wider
from tengserve_backend.execution.sampling.row import Columns, SamplingRow, columns

_UNUSABLE, _BEYOND_HEAD = -1, -2
# On a CPU, so many logits at once stay in the cache through all that is done with them.
_CPU_BLOCK = 2**20


@dataclass(frozen=True, slots=True)
class _Path:
    """What is done with a row.

    Attributes:
        adjusted: its logits change first.
        filters: of a row that is drawn; None for one that takes the maximum.
    """

    adjusted: bool
    filters: Filters | None

    def wider(self, width: int) -> _Path:
        """For a row whose top-p reached beyond the head."""
        return self if self.filters is None else replace(self, filters=wider(self.filters, width))


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int | None]:
    """Choose a token for every row.

    Args:
        logits: [R, vocabulary], any float dtype; left as they are.
        rows: R rows.

    Returns:
        R token ids; None for a row whose logits are not finite enough to choose from.
    """
    width = _padded(logits.shape[1])
    paths = {index: _path(row, width) for index, row in enumerate(rows)}
    tokens: list[int | None] = [None] * len(rows)
    while paths:
        chosen = _choose(logits, rows, paths)
        tokens = [chosen.get(index, token) for index, token in enumerate(tokens)]
        paths = {index: paths[index].wider(width) for index, token in chosen.items() if token == _BEYOND_HEAD}
    return [None if token == _UNUSABLE else token for token in tokens]


def distribution(logits: torch.Tensor, row: SamplingRow) -> torch.Tensor:
    """The probabilities that `sample` draws a row with: float32 [vocabulary].

    Args:
        logits: [vocabulary], with a finite maximum.
        row: its do_sample does not matter.
    """
    scores = _scores(logits.unsqueeze(0), [row], adjusted=row.adjusts)
    parameters = columns([row], logits.device)
    filters = filters_of(row.sampling, scores.shape[1])
    weights, _, found = _weights(scores, parameters, filters)
    while not found.item():
        filters = wider(filters, scores.shape[1])
        weights, _, found = _weights(scores, parameters, filters)
    return (weights / weights.sum())[0, : logits.shape[0]]


def _path(row: SamplingRow, width: int) -> _Path:
    return _Path(row.adjusts, filters_of(row.sampling, width) if row.sampling.do_sample else None)


def _choose(logits: torch.Tensor, rows: Sequence[SamplingRow], paths: Mapping[int, _Path]) -> dict[int, int]:
    """A token id, or one of the negative marks, for each row that has a path. One read for all."""
    members: dict[_Path, list[int]] = {}
    for index, path in paths.items():
        members.setdefault(path, []).append(index)
    order: list[int] = []
    parts: list[torch.Tensor] = []
    for path, indices in members.items():
        at_once = _rows_at_once(logits, path, len(indices))
        for first in range(0, len(indices), at_once):
            block = indices[first : first + at_once]
            parts.append(_choose_alike(_select(logits, block), [rows[index] for index in block], path))
            order += block
    return dict(zip(order, torch.cat(parts).tolist(), strict=True))


def _rows_at_once(logits: torch.Tensor, path: _Path, count: int) -> int:
    copied = path.adjusted or path.filters is not None or count < logits.shape[0]
    if logits.device.type == "cpu" and copied:
        return max(1, _CPU_BLOCK // logits.shape[1])
    return count


def _choose_alike(logits: torch.Tensor, rows: Sequence[SamplingRow], path: _Path) -> torch.Tensor:
    """int64 [R] for rows of one path."""
    if path.adjusted or path.filters is not None:
        logits = _scores(logits, rows, adjusted=path.adjusted)
    if path.filters is None:
        # max, not argmax: its value comes for free and is NaN whenever the row has one; it is also the faster kernel.
        maxima, tokens = logits.max(dim=-1)
    else:
        parameters = columns(rows, logits.device)
        weights, column, found = _weights(logits, parameters, path.filters)
        tokens = torch.where(found.squeeze(1), draw(weights, parameters.uniforms), _BEYOND_HEAD)
        maxima = column.squeeze(1)
    return torch.where(torch.isfinite(maxima), tokens, _UNUSABLE)


def _weights(
    scores: torch.Tensor, parameters: Columns, filters: Filters
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What rows are drawn with.

    Returns:
        weights: [R, width]; probabilities, not normalised again, of the tokens that are kept, and 0 for the others.
        maxima: [R, 1], of the scores.
        found: see `lowest_kept`.
    """
    maxima = scores.amax(dim=-1, keepdim=True)
    # The maximum goes first, so a tiny temperature makes the others -inf and not the maximum +inf.
    scaled = (scores - maxima).div_(parameters.temperatures)
    probabilities = torch.softmax(scaled, dim=-1)
    limits, found = lowest_kept(scores, maxima, probabilities, parameters, filters)
    # Comparing into floats and multiplying is several times faster than a boolean mask.
    return probabilities.mul_(torch.ge(scores, limits, out=scaled)), maxima, found


def _scores(logits: torch.Tensor, rows: Sequence[SamplingRow], *, adjusted: bool) -> torch.Tensor:
    """Logits [R, vocabulary] in float32, padded with -inf to whole chunks, adjusted."""
    scores = logits.to(torch.float32, copy=adjusted)
    missing = _padded(scores.shape[1]) - scores.shape[1]
    if missing:
        scores = torch.nn.functional.pad(scores, (0, missing), value=float("-inf"))
    if adjusted:
        adjust(scores, rows)
    return scores


def _padded(vocabulary: int) -> int:
    return -(-vocabulary // CHUNK) * CHUNK


def _select(logits: torch.Tensor, indices: Sequence[int]) -> torch.Tensor:
    """Rows by ascending index; the tensor itself when that is all of them."""
    if len(indices) == logits.shape[0]:
        return logits
    return logits.index_select(0, torch.tensor(indices, device=logits.device))
