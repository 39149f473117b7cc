"""Triton's statistics of one model, counted by its instances and its callers."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from tengserve_backend.inference import ModelStatistics


@dataclass(slots=True)
class _Duration:
    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        self.count += 1
        self.ns += max(0, ns)

    def pair(self) -> tuple[int, int]:
        return self.count, self.ns


@dataclass(slots=True)
class RequestTimes:
    """When a request came to each of its stations, in nanoseconds of the monotonic clock; 0 where it did not come."""

    enqueued: int = 0
    taken: int = 0
    called: int = 0
    returned: int = 0


@dataclass(slots=True)
class Counters:
    """Thread-safe."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _inferences: int = 0
    _executions: int = 0
    _last_ms: int = 0
    _durations: dict[str, _Duration] = field(
        default_factory=lambda: {
            name: _Duration()
            for name in ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cancel")
        }
    )

    def executed(self) -> None:
        """The model was called once."""
        with self._lock:
            self._executions += 1

    def succeeded(self, times: RequestTimes, batch: int) -> None:
        """A request got everything that the model had to say."""
        now = time.monotonic_ns()
        returned = times.returned or now
        with self._lock:
            self._inferences += batch
            self._last_ms = time.time_ns() // 1_000_000
            self._durations["success"].add(now - times.enqueued)
            self._durations["queue"].add(times.taken - times.enqueued)
            self._durations["compute_input"].add(times.called - times.taken)
            self._durations["compute_infer"].add(returned - times.called)
            self._durations["compute_output"].add(now - returned)

    def failed(self, times: RequestTimes) -> None:
        """A request got an error."""
        self._ended("fail", times)

    def cancelled(self, times: RequestTimes) -> None:
        """Nobody waited for a request any more."""
        self._ended("cancel", times)

    def _ended(self, name: str, times: RequestTimes) -> None:
        now = time.monotonic_ns()
        with self._lock:
            self._last_ms = time.time_ns() // 1_000_000
            self._durations[name].add(now - times.enqueued)

    def snapshot(self) -> ModelStatistics:
        """The counts now."""
        with self._lock:
            durations = {name: duration.pair() for name, duration in self._durations.items()}
            return ModelStatistics(
                inference_count=self._inferences,
                execution_count=self._executions,
                last_inference_ms=self._last_ms,
                **durations,
            )
