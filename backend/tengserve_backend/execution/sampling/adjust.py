"""What changes single logits before anything is chosen: biases, then penalties.

A bias comes first, as in transformers and vLLM, so a penalty works on the biased logit. Tokens of the prompt count for
the repetition penalty only; presence and frequency look at the output alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tengserve_backend.execution.sampling.history import TokenHistory
from tengserve_backend.execution.sampling.row import SamplingRow, bounded
from tengserve_backend.execution.snapshot import Piece, Snapshot, Uploaded
from tengserve_backend.generation.sampling import ResolvedSampling


class Adjustments:
    """What is to happen to the float32 logits [R, width] of R rows. Each kind of change goes up at once for all rows.

    A token that the model reads and has no logit for is left out.

    Args:
        rows: the rows.
        width: logits of a row.
        snapshot: that the logits' step sends up.
    """

    def __init__(self, rows: Sequence[SamplingRow], width: int, snapshot: Snapshot) -> None:
        self._biases: tuple[Piece, Piece] | None = None
        self._penalties: tuple[Piece, Piece] | None = None
        biased = [(index, row.biases) for index, row in enumerate(rows) if row.biases]
        if biased:
            ids = {index: np.fromiter(biases, np.int64, len(biases)) for index, biases in biased}
            values = [np.fromiter(biases.values(), np.float32, len(biases)) for _, biases in biased]
            self._biases = _add(snapshot, width, ids, np.concatenate(values)[None])
        penalized = [(index, row.sampling, row.history) for index, row in enumerate(rows) if row.history is not None]
        if penalized:
            ids = {index: history.token_ids for index, _, history in penalized}
            penalties = [_penalties(sampling, history) for _, sampling, history in penalized]
            self._penalties = _add(snapshot, width, ids, np.concatenate(penalties, axis=1))

    def apply(self, logits: torch.Tensor, uploaded: Uploaded) -> None:
        """Change the logits in place."""
        flat = logits.view(-1)
        if self._biases is not None:
            at, (bias,) = uploaded.int64(self._biases[0]), uploaded.floats(self._biases[1])
            flat[at] += bias
        if self._penalties is not None:
            at, (factor, minus) = uploaded.int64(self._penalties[0]), uploaded.floats(self._penalties[1])
            scores = flat[at]
            flat[at] = torch.where(scores < 0, scores * factor, scores / factor) - minus


def _add(
    snapshot: Snapshot, width: int, ids: dict[int, NDArray[np.int64]], values: NDArray[np.float32]
) -> tuple[Piece, Piece]:
    """Places in the flat logits of token ids by row, and what [kinds, ids] is to happen there."""
    columns = np.concatenate(list(ids.values()))
    places = np.concatenate([row_ids + index * width for index, row_ids in ids.items()])
    # Configurations have -1 where they mean no token.
    inside = (columns >= 0) & (columns < width)
    return snapshot.add_integers(places[inside]), snapshot.add_floats(values[:, inside])


def _penalties(sampling: ResolvedSampling, history: TokenHistory) -> NDArray[np.float32]:
    """For each distinct token of a history, what its logit is scaled by and what is subtracted: [2, tokens]."""
    counts = history.output_counts
    minus = sampling.presence_penalty * (counts > 0) + sampling.frequency_penalty * counts
    return np.stack([np.full(len(counts), bounded(sampling.repetition_penalty)), minus]).astype(np.float32)
