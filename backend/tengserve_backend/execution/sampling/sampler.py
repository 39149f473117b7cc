"""Logits to token ids, in float32 and on any device, without torch's random numbers, float64 or a sort of integers.

Order of the rules: biases, repetition penalty (prompt and output), presence and frequency penalty (output),
temperature, top-k, top-p, min-p; then the inverse of the cumulative distribution at one uniform number. A row's answer
depends on its own logits, parameters and uniform number only, bit for bit: rows that take the same path are computed
together, and the path follows from the row's parameters. Greedy rows take the maximum and nothing else.

All that the rows bring goes up with the step's snapshot, and the host reads the device once. Only where a row's top-p
reached beyond the largest logits that were looked at, the row is done again with more of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tengserve_backend.execution.sampling.adjust import Adjustments
from tengserve_backend.execution.sampling.draw import CHUNK, draw
from tengserve_backend.execution.sampling.filters import Filters, filters_of, lowest_kept, wider
from tengserve_backend.execution.sampling.greedy import UNUSABLE, Greedy, greedy, usable
from tengserve_backend.execution.sampling.row import Columns, SamplingRow, add_columns, columns
from tengserve_backend.execution.snapshot import Piece, Snapshot, Upload, Uploaded

Choice = Callable[[torch.Tensor, Uploaded], list[int | None]]
"""See Sampler.choose."""

_BEYOND_HEAD = -2
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


class Sampler:
    """How a token is to be chosen for each of R rows, once their logits are there.

    Args:
        rows: R rows.
        vocabulary: logits of a row.
        snapshot: that the logits' step sends up.
        upload: to the logits' device, for rows that have to be done again.
        greedy: how rows that are not drawn choose.
        on_cpu: whether the logits are on the CPU.
    """

    def __init__(
        self,
        rows: Sequence[SamplingRow],
        vocabulary: int,
        snapshot: Snapshot,
        upload: Upload,
        greedy: Greedy,
        *,
        on_cpu: bool,
    ) -> None:
        self._rows = rows
        self._vocabulary = vocabulary
        self._width = _padded(vocabulary)
        self._upload = upload
        self._greedy = greedy
        self._on_cpu = on_cpu
        self._paths = {index: _path(row, self._width) for index, row in enumerate(rows)}
        self._groups = self._prepare(self._paths, snapshot)

    def choose(self, logits: torch.Tensor, uploaded: Uploaded) -> list[int | None]:
        """Choose a token for every row.

        Args:
            logits: [R, vocabulary], any float dtype; left as they are.
            uploaded: the snapshot.

        Returns:
            R token ids; None for a row whose logits are not finite enough to choose from.
        """
        tokens = _read(self._groups, logits, uploaded)
        paths = self._paths
        while again := [index for index, token in tokens.items() if token == _BEYOND_HEAD]:
            paths = {index: paths[index].wider(self._width) for index in again}
            snapshot = Snapshot()
            groups = self._prepare(paths, snapshot)
            tokens |= _read(groups, logits, snapshot.upload(self._upload))
        return usable(tokens[index] for index in range(len(self._rows)))

    def _prepare(self, paths: Mapping[int, _Path], snapshot: Snapshot) -> list[_Group]:
        members: dict[_Path, list[int]] = {}
        for index, path in paths.items():
            members.setdefault(path, []).append(index)
        groups = []
        for path, indices in members.items():
            at_once = self._rows_at_once(path, len(indices))
            for first in range(0, len(indices), at_once):
                block = indices[first : first + at_once]
                all_rows = len(block) == len(self._rows)
                rows = [self._rows[index] for index in block]
                groups.append(_Group(block, rows, self._width, path, snapshot, self._greedy, all_rows=all_rows))
        return groups

    def _rows_at_once(self, path: _Path, count: int) -> int:
        copied = path.adjusted or path.filters is not None or count < len(self._rows)
        if self._on_cpu and copied:
            return max(1, _CPU_BLOCK // self._vocabulary)
        return count


class _Group:
    """Rows that take the same path, all of it in tensors.

    Args:
        indices: of the rows among the logits, ascending.
        rows: these.
        width: of their logits, padded.
        path: what is done.
        snapshot: of the step.
        greedy: how to choose without drawing.
        all_rows: whether these are all rows of the logits.
    """

    def __init__(
        self,
        indices: Sequence[int],
        rows: Sequence[SamplingRow],
        width: int,
        path: _Path,
        snapshot: Snapshot,
        greedy: Greedy,
        *,
        all_rows: bool,
    ) -> None:
        self.indices = indices
        self._greedy = greedy
        self._width = width
        self._filters = path.filters
        self._selected: Piece | None = None if all_rows else snapshot.add_integers(indices)
        self._adjustments = Adjustments(rows, width, snapshot) if path.adjusted else None
        self._columns = add_columns(rows, snapshot) if path.filters is not None else None

    def choose(self, logits: torch.Tensor, uploaded: Uploaded) -> torch.Tensor:
        """int64 [rows]: a token id, or one of the negative marks."""
        if self._selected is not None:
            logits = logits.index_select(0, uploaded.int64(self._selected))
        if self._filters is None or self._columns is None:
            if self._adjustments is not None:
                logits = self.scores(logits, uploaded)
            return self._greedy(logits)
        parameters = columns(self._columns, uploaded)
        weights, maxima, found = _weights(self.scores(logits, uploaded), parameters, self._filters)
        tokens = torch.where(found.squeeze(1), draw(weights, parameters.uniforms), _BEYOND_HEAD)
        return torch.where(torch.isfinite(maxima.squeeze(1)), tokens, UNUSABLE)

    def scores(self, logits: torch.Tensor, uploaded: Uploaded) -> torch.Tensor:
        """Logits [rows, vocabulary] in float32, padded with -inf to whole chunks, adjusted."""
        scores = logits.to(torch.float32, copy=self._adjustments is not None)
        missing = self._width - scores.shape[1]
        if missing:
            scores = torch.nn.functional.pad(scores, (0, missing), value=float("-inf"))
        if self._adjustments is not None:
            self._adjustments.apply(scores, uploaded)
        return scores


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int | None]:
    """Choose tokens with a snapshot of their own. Arguments and result as in Sampler.choose."""
    snapshot, upload = Snapshot(), _upload_to(logits.device)
    sampler = Sampler(rows, logits.shape[1], snapshot, upload, greedy, on_cpu=logits.device.type == "cpu")
    return sampler.choose(logits, snapshot.upload(upload))


def distribution(logits: torch.Tensor, row: SamplingRow) -> torch.Tensor:
    """The probabilities that `sample` draws a row with: float32 [vocabulary].

    Args:
        logits: [vocabulary], with a finite maximum.
        row: its do_sample does not matter.
    """
    width = _padded(logits.shape[0])
    filters = filters_of(row.sampling, width)
    snapshot = Snapshot()
    group = _Group([0], [row], width, _Path(row.adjusts, filters), snapshot, greedy, all_rows=True)
    piece = add_columns([row], snapshot)
    uploaded = snapshot.upload(_upload_to(logits.device))
    scores = group.scores(logits.unsqueeze(0), uploaded)
    parameters = columns(piece, uploaded)
    weights, _, found = _weights(scores, parameters, filters)
    while not found.item():
        filters = wider(filters, width)
        weights, _, found = _weights(scores, parameters, filters)
    return (weights / weights.sum())[0, : logits.shape[0]]


def _upload_to(device: torch.device) -> Upload:
    return lambda host: host.to(device)


def _path(row: SamplingRow, width: int) -> _Path:
    return _Path(row.adjusts, filters_of(row.sampling, width) if row.sampling.do_sample else None)


def _read(groups: Sequence[_Group], logits: torch.Tensor, uploaded: Uploaded) -> dict[int, int]:
    """A token id, or one of the negative marks, by row. One read for all."""
    order = [index for group in groups for index in group.indices]
    chosen = torch.cat([group.choose(logits, uploaded) for group in groups]).tolist()
    return dict(zip(order, chosen, strict=True))


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


def _padded(vocabulary: int) -> int:
    return -(-vocabulary // CHUNK) * CHUNK
