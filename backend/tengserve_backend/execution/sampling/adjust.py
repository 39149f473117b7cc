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
from tengserve_backend.generation.sampling import ResolvedSampling


def adjust(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    """Change float32 logits [R, width] in place, by R rows. Each kind of change goes up in one piece for all rows."""
    flat, width = logits.view(-1), logits.shape[1]
    starts = [(index * width, row) for index, row in enumerate(rows)]
    biased = [(start, row.biases) for start, row in starts if row.biases]
    if biased:
        places = [np.fromiter(biases, np.int64, len(biases)) + start for start, biases in biased]
        values = [np.fromiter(biases.values(), np.float32, len(biases)) for _, biases in biased]
        at = torch.from_numpy(np.concatenate(places)).to(flat.device)
        flat[at] += torch.from_numpy(np.concatenate(values)).to(flat.device)
    penalized = [(start, row.sampling, row.history) for start, row in starts if row.history is not None]
    if penalized:
        places = [history.token_ids + start for start, _, history in penalized]
        penalties = [_penalties(sampling, history) for _, sampling, history in penalized]
        at = torch.from_numpy(np.concatenate(places)).to(flat.device)
        factor, minus = torch.from_numpy(np.concatenate(penalties, axis=1)).to(flat.device)
        scores = flat[at]
        flat[at] = torch.where(scores < 0, scores * factor, scores / factor) - minus


def _penalties(sampling: ResolvedSampling, history: TokenHistory) -> NDArray[np.float32]:
    """For each distinct token of a history, what its logit is scaled by and what is subtracted: [2, tokens]."""
    counts = history.output_counts
    minus = sampling.presence_penalty * (counts > 0) + sampling.frequency_penalty * counts
    return np.stack([np.full(len(counts), bounded(sampling.repetition_penalty)), minus]).astype(np.float32)
