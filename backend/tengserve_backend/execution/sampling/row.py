"""What one row of logits is to be sampled with, and the same of several rows as columns on the device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tengserve_backend.execution.rng import uniform
from tengserve_backend.execution.sampling.history import TokenHistory
from tengserve_backend.execution.snapshot import Piece, Snapshot, Uploaded
from tengserve_backend.generation.sampling import ResolvedSampling

# Parameters may be any positive number; float32 would make NaN of those beyond this one and its inverse.
_SMALLEST = 1e-30


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What one row of logits is to be sampled with.

    Attributes:
        sampling: the parameters.
        index: of the token in its answer, from 0.
        history: the tokens so far; None when `sampling` has no penalties.
        biases: added to the logits of tokens; minus infinity forbids one.
    """

    sampling: ResolvedSampling
    index: int = 0
    history: TokenHistory | None = None
    biases: Mapping[int, float] = field(default_factory=dict)

    @property
    def adjusts(self) -> bool:
        """Whether this row's logits change."""
        return bool(self.biases) or self.history is not None


@dataclass(frozen=True, slots=True)
class Columns:
    """The parameters of R rows, each [R, 1].

    Attributes:
        temperatures: float32.
        top_k: int64, 0 for no limit.
        top_p: float32, 1 for no limit.
        min_p_drops: float32; how far below the largest logit min_p reaches, infinity for no limit.
        uniforms: float32, one number in [0, 1] a row.
    """

    temperatures: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p_drops: torch.Tensor
    uniforms: torch.Tensor


def add_columns(rows: Sequence[SamplingRow], snapshot: Snapshot) -> Piece:
    """Send the parameters of rows up with a snapshot: a top_k is below 2**24, so float32 holds it."""
    return snapshot.add_floats([_numbers(row) for row in rows])


def columns(piece: Piece, uploaded: Uploaded) -> Columns:
    """What `add_columns` sent."""
    temperatures, top_k, top_p, min_p_drops, uniforms = uploaded.floats(piece).unsqueeze(-1).unbind(1)
    return Columns(temperatures, top_k.to(torch.int64), top_p, min_p_drops, uniforms)


def bounded(value: float) -> float:
    """A positive parameter, as close as float32 can work with."""
    return min(max(value, _SMALLEST), 1 / _SMALLEST)


def _numbers(row: SamplingRow) -> tuple[float, float, float, float, float]:
    sampling = row.sampling
    temperature = bounded(sampling.temperature)
    # p(token) >= min_p * p(most probable token), in logits.
    drop = -temperature * math.log(sampling.min_p) if sampling.min_p > 0.0 else math.inf
    return temperature, sampling.top_k, bounded(sampling.top_p), drop, uniform(sampling.seed, row.index)
