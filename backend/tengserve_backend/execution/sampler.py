"""Logits to token ids, row by row, in float32 and on any device.

A row's answer depends on its own logits, parameters and uniform number only. Order of the rules: repetition penalty
(prompt and output), presence and frequency penalty (output), temperature, top-k, top-p, min-p; then the inverse of the
cumulative distribution at one uniform number. Greedy rows take the maximum and never reach the sort.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tengserve_backend.execution.rng import uniform
from tengserve_backend.generation.sampling import ResolvedSampling

# Parameters may be any positive number; beyond these float32 would make NaN of them.
_SMALLEST = 1e-30


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What one row of logits is to be sampled with.

    Attributes:
        sampling: the parameters.
        prompt_ids: tokens of the prompt.
        output_ids: tokens generated so far.
        banned_ids: tokens that may not be chosen now.
    """

    sampling: ResolvedSampling
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    banned_ids: Sequence[int] = ()


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int | None]:
    """Choose a token for every row.

    Args:
        logits: [R, vocabulary], any float dtype.
        rows: R rows.

    Returns:
        R token ids; None for a row whose logits are not finite enough to choose from.
    """
    if not any(row.sampling.do_sample or row.sampling.has_penalties or row.banned_ids for row in rows):
        return _greedy(logits)
    logits = logits.to(torch.float32, copy=True)
    for index, row in enumerate(rows):
        _penalize(logits[index], row)
    tokens = _greedy(logits)
    sampled = [index for index, row in enumerate(rows) if row.sampling.do_sample and tokens[index] is not None]
    if sampled:
        chosen = _draw(logits[sampled], [rows[index] for index in sampled])
        for index, token in zip(sampled, chosen, strict=True):
            tokens[index] = token
    return tokens


def _greedy(logits: torch.Tensor) -> list[int | None]:
    # max, not argmax: its value comes for free and is NaN whenever the row has one; it is also the faster kernel.
    values, indices = logits.max(dim=-1)
    usable = torch.isfinite(values).tolist()
    return [token if ok else None for token, ok in zip(indices.tolist(), usable, strict=True)]


def _penalize(logits: torch.Tensor, row: SamplingRow) -> None:
    """Change one row of logits [vocabulary] in place."""
    sampling = row.sampling
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*row.prompt_ids, *row.output_ids}), device=logits.device)
        scores = logits[seen]
        penalty = min(max(sampling.repetition_penalty, _SMALLEST), 1 / _SMALLEST)
        logits[seen] = torch.where(scores < 0, scores * penalty, scores / penalty)
    if row.output_ids and (sampling.presence_penalty or sampling.frequency_penalty):
        counted = Counter(row.output_ids)
        generated = torch.tensor(list(counted), device=logits.device)
        counts = torch.tensor(list(counted.values()), dtype=torch.float32, device=logits.device)
        logits[generated] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    if row.banned_ids:
        logits[torch.tensor(row.banned_ids, device=logits.device)] = float("-inf")


def _draw(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Sample rows of logits [R, vocabulary] whose maximum is finite."""
    device = logits.device

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device).unsqueeze(1)

    vocabulary = logits.shape[1]
    temperatures = column([max(row.sampling.temperature, _SMALLEST) for row in rows])
    # The maximum goes first, so a tiny temperature makes the others -inf and not the maximum +inf.
    scores = (logits - logits.max(dim=-1, keepdim=True).values) / temperatures
    scores, order = scores.sort(dim=-1, descending=True, stable=True)
    top_k = torch.tensor([row.sampling.top_k or vocabulary for row in rows], device=device).unsqueeze(1)
    # Tokens that tie with the k-th stay, as in transformers.
    kth = scores.gather(1, (top_k - 1).clamp(max=vocabulary - 1))
    scores = scores.masked_fill(scores < kth, float("-inf"))
    probabilities = torch.softmax(scores, dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    # A top_p of 1 is no limit, also where rounding makes the cumulative probability reach 1 early.
    top_p = column([row.sampling.top_p if row.sampling.top_p < 1.0 else 2.0 for row in rows])
    # A token stays while the more probable ones do not reach top_p; the first always stays.
    dropped = before >= top_p
    dropped[:, 0] = False
    probabilities = probabilities.masked_fill(dropped, 0.0)
    min_p = column([row.sampling.min_p for row in rows])
    probabilities = probabilities.masked_fill(probabilities < min_p * probabilities[:, :1], 0.0)
    cumulative = probabilities.cumsum(dim=-1)
    uniforms = column([uniform(row.sampling.seed, len(row.output_ids)) for row in rows])
    targets = uniforms * cumulative[:, -1:]
    # The first token whose cumulative probability passes the target; rounding may not reach past the last kept one.
    kept = (probabilities > 0).sum(dim=-1, keepdim=True)
    positions = (cumulative <= targets).sum(dim=-1, keepdim=True).clamp(max=kept - 1)
    return [int(token) for token in order.gather(1, positions).squeeze(1).tolist()]
