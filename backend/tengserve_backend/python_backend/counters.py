"""Triton's statistics of one model, counted by its instances and its callers."""

from __future__ import annotations

import enum
import threading
import time
from dataclasses import dataclass

from tengserve_backend.inference import BatchStatistics, FailureReason, ModelStatistics, ResponseStatistics

MAX_COUNTED_RESPONSES = 256
"""Places of a response in its request that are counted apart; a stream has no end of them."""


@dataclass(slots=True)
class _Duration:
    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        self.count += 1
        if ns > 0:
            self.ns += ns

    def pair(self) -> tuple[int, int]:
        return self.count, self.ns


@dataclass(slots=True)
class _Batch:
    count: int = 0
    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0


class ResponseEnd(enum.Enum):
    """What became of one response."""

    SUCCEEDED = "success"
    FAILED = "fail"
    EMPTY = "empty_response"
    CANCELLED = "cancel"


@dataclass(slots=True)
class RequestTimes:
    """When a request came to each of its stations, in nanoseconds of the monotonic clock; 0 where it did not come.

    Attributes:
        enqueued: it began to wait.
        taken: an instance took it.
        called: the model was called with it.
        returned: the model's call came back.
        responded: its last response so far was handed over.
    """

    enqueued: int = 0
    taken: int = 0
    called: int = 0
    returned: int = 0
    responded: int = 0


class Counters:
    """Thread-safe.

    Args:
        per_response: count the responses of a request one by one, as of a decoupled model.
    """

    def __init__(self, *, per_response: bool) -> None:
        self.per_response = per_response
        self._lock = threading.Lock()
        self._inferences = 0
        self._executions = 0
        self._last_ms = 0
        names = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cancel")
        self._durations = {name: _Duration() for name in names}
        self._failures = dict.fromkeys(FailureReason, 0)
        self._batches: dict[int, _Batch] = {}
        self._responses: list[dict[str, _Duration]] = []

    def executed(self) -> None:
        """The model was called once."""
        with self._lock:
            self._executions += 1

    def came_back(self, batch: int, times: RequestTimes) -> None:
        """A call came back, and what it returned is about to be answered.

        Args:
            batch: what its requests sum up to.
            times: of any of its requests.
        """
        with self._lock:
            counted = self._batches.get(batch)
            if counted is None:
                counted = self._batches[batch] = _Batch()
            counted.count += 1
            counted.input_ns += times.called - times.taken
            counted.infer_ns += times.returned - times.called

    def answered(self, batch: int, times: RequestTimes) -> None:
        """What the same call returned has been answered."""
        now = time.monotonic_ns()
        with self._lock:
            self._batches[batch].output_ns += now - times.returned

    def responded(self, index: int, end: ResponseEnd, times: RequestTimes, sent: int) -> None:
        """A response is about to be handed over, or given up.

        Args:
            index: its place in its request.
            end: what became of it.
            times: of its request; the last station is changed.
            sent: when the model handed it in, in nanoseconds of the monotonic clock.
        """
        now = time.monotonic_ns()
        since = times.responded or times.called
        times.responded = now
        if index >= MAX_COUNTED_RESPONSES:
            return
        with self._lock:
            while len(self._responses) <= index:
                self._responses.append({name: _Duration() for name in ResponseStatistics.__dataclass_fields__})
            counted = self._responses[index]
            counted[end.value].add(now - since)
            if end is not ResponseEnd.CANCELLED:
                counted["compute_infer"].add(sent - since)
            if end is ResponseEnd.SUCCEEDED:
                counted["compute_output"].add(now - sent)

    def succeeded(self, times: RequestTimes, batch: int) -> None:
        """A request got everything that the model had to say."""
        now = time.monotonic_ns()
        returned = times.returned or now
        durations = self._durations
        with self._lock:
            self._inferences += batch
            self._last_ms = time.time_ns() // 1_000_000
            durations["success"].add(now - times.enqueued)
            durations["queue"].add(times.taken - times.enqueued)
            durations["compute_input"].add(times.called - times.taken)
            durations["compute_infer"].add(returned - times.called)
            durations["compute_output"].add(now - returned)

    def failed(self, times: RequestTimes, reason: FailureReason) -> None:
        """A request got an error."""
        self._ended("fail", times, reason)

    def cancelled(self, times: RequestTimes) -> None:
        """Nobody waited for a request any more."""
        self._ended("cancel", times)

    def _ended(self, name: str, times: RequestTimes, reason: FailureReason | None = None) -> None:
        now = time.monotonic_ns()
        with self._lock:
            self._last_ms = time.time_ns() // 1_000_000
            self._durations[name].add(now - times.enqueued)
            if reason is not None:
                self._failures[reason] += 1

    def snapshot(self, *, pending: int) -> ModelStatistics:
        """The counts now, and how many requests wait."""
        with self._lock:
            durations = {name: duration.pair() for name, duration in self._durations.items()}
            return ModelStatistics(
                inference_count=self._inferences,
                execution_count=self._executions,
                last_inference_ms=self._last_ms,
                **durations,
                batches=tuple(
                    BatchStatistics(size, batch.count, batch.input_ns, batch.infer_ns, batch.output_ns)
                    for size, batch in sorted(self._batches.items())
                ),
                responses=tuple(
                    ResponseStatistics(**{name: duration.pair() for name, duration in counted.items()})
                    for counted in self._responses
                ),
                failures=dict(self._failures),
                pending=pending,
            )
