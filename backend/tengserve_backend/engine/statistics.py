"""What an engine has done since its start: counters and histograms, written by its thread, read from any."""

from __future__ import annotations

import bisect
import time
from collections.abc import Mapping
from dataclasses import dataclass

from tengserve_backend.generation import FinishReason

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True, slots=True)
class Histogram:
    """Values by size.

    Attributes:
        bounds: upper bounds, each inclusive; what is above the last is in one more bucket.
        counts: values in each bucket; one more than bounds.
        total: sum of the values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        """Values seen."""
        return sum(self.counts)


class HistogramRecorder:
    """Counts values into buckets. One thread records; a snapshot may be taken from any."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def record(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._total += value

    def snapshot(self) -> Histogram:
        """The counts now; a value being recorded meanwhile may be in the counts and not yet in the total."""
        return Histogram(self._bounds, tuple(self._counts), self._total)


@dataclass(frozen=True, slots=True)
class Statistics:
    """Since the engine's start.

    Attributes:
        prompt_tokens: of requests that started.
        generated_tokens: chosen by the model.
        finished: complete answers by reason.
        failed: requests that ended with an error of ours, a passed deadline included.
        aborted: requests that were cancelled.
        last_inference_ms: wall clock milliseconds when the last answer was complete; 0 before the first.
        queue_seconds: from submission to the first step.
        first_token_seconds: from submission to the first token.
        token_seconds: from one token of a request to its next.
        step_seconds: of a step.
        step_sequences, step_tokens: computed in a step.
        phase_seconds: of the steps, by phase; empty when that is not measured.
    """

    prompt_tokens: int
    generated_tokens: int
    finished: dict[FinishReason, int]
    failed: int
    aborted: int
    last_inference_ms: int
    queue_seconds: Histogram
    first_token_seconds: Histogram
    token_seconds: Histogram
    step_seconds: Histogram
    step_sequences: Histogram
    step_tokens: Histogram
    phase_seconds: Mapping[str, float]


class StatisticsRecorder:
    """Written by the engine's thread only.

    Args:
        phase_seconds: adds up while the engine runs; see Statistics.
    """

    def __init__(self, phase_seconds: Mapping[str, float]) -> None:
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self._finished = dict.fromkeys(FinishReason, 0)
        self.failed = 0
        self.aborted = 0
        self._last_inference_ms = 0
        self.queue_seconds = HistogramRecorder(_SECONDS)
        self.first_token_seconds = HistogramRecorder(_SECONDS)
        self.token_seconds = HistogramRecorder(_SECONDS)
        self.step_seconds = HistogramRecorder(_SECONDS)
        self.step_sequences = HistogramRecorder(_SIZES)
        self.step_tokens = HistogramRecorder(_SIZES)
        self._phase_seconds = phase_seconds

    def finish(self, reason: FinishReason) -> None:
        """Count a complete answer."""
        self._finished[reason] += 1
        self._last_inference_ms = time.time_ns() // 1_000_000

    def snapshot(self) -> Statistics:
        """Everything now."""
        return Statistics(
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
            finished=dict(self._finished),
            failed=self.failed,
            aborted=self.aborted,
            last_inference_ms=self._last_inference_ms,
            queue_seconds=self.queue_seconds.snapshot(),
            first_token_seconds=self.first_token_seconds.snapshot(),
            token_seconds=self.token_seconds.snapshot(),
            step_seconds=self.step_seconds.snapshot(),
            step_sequences=self.step_sequences.snapshot(),
            step_tokens=self.step_tokens.snapshot(),
            phase_seconds=dict(self._phase_seconds),
        )
