"""Triton's own metrics of a model, by Triton's names, beside ours on /metrics: Triton's dashboards go on working.

They are the models' statistics, read when they are scraped. A model has these series while it is ready: one that is
unloaded has none, and one that is loaded again starts anew, as in Triton.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tengserve_backend.errors import TengserveError
from tengserve_backend.inference import FailureReason, ModelStatistics
from tengserve_backend.repository.manager import ModelManager, ModelState

LABELS = ("model", "version")
PENDING = ("nv_inference_pending_request_count", "Requests that wait for the model.")
FAILURE_LABELS = ("model", "version", "reason")
FAILURE = (
    "nv_inference_request_failure",
    "Failed requests; REJECTED: the queue was full or the wait too long, CANCELED, BACKEND: the model failed, OTHER.",
)
COUNTERS: tuple[tuple[str, str, Callable[[ModelStatistics], int]], ...] = (
    ("nv_inference_request_success", "Answered requests.", lambda seen: seen.success[0]),
    ("nv_inference_count", "Inferences: requests times their batch.", lambda seen: seen.inference_count),
    ("nv_inference_exec_count", "Calls of the model; steps of an LLM's engine.", lambda seen: seen.execution_count),
    (
        "nv_inference_request_duration_us",
        "Microseconds that answered requests took.",
        lambda seen: _us(seen.success),
    ),
    ("nv_inference_queue_duration_us", "Microseconds that answered requests waited.", lambda seen: _us(seen.queue)),
    (
        "nv_inference_compute_input_duration_us",
        "Microseconds that answered requests spent before the model's code.",
        lambda seen: _us(seen.compute_input),
    ),
    (
        "nv_inference_compute_infer_duration_us",
        "Microseconds that answered requests spent in the model's code.",
        lambda seen: _us(seen.compute_infer),
    ),
    (
        "nv_inference_compute_output_duration_us",
        "Microseconds that answered requests spent after the model's code.",
        lambda seen: _us(seen.compute_output),
    ),
)


class TritonCollector(Collector):
    """Reads the statistics of all ready models at each scrape."""

    def __init__(self, models: ModelManager) -> None:
        self._models = models

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering the collector must not ask the models."""
        return []

    def collect(self) -> Iterable[Metric]:
        """See Collector."""
        # The library would end the name of a counter in `_total`, and Triton's names do not.
        counters = [Metric(name, text, "unknown") for name, text, _ in COUNTERS]
        failure = Metric(*FAILURE, "unknown")
        pending = Metric(*PENDING, "gauge")
        for model in self._models.statuses():
            if model.state is not ModelState.READY:
                continue
            with contextlib.suppress(TengserveError):  # It was unloaded just now.
                seen = self._models.tensor_model(model.name, model.version).statistics()
                labels = dict(zip(LABELS, (model.name, model.version), strict=True))
                for metric, (name, _, read) in zip(counters, COUNTERS, strict=True):
                    metric.add_sample(name, labels, read(seen))
                for reason, count in _failures(seen):
                    failure.add_sample(FAILURE[0], {**labels, "reason": reason}, count)
                pending.add_sample(PENDING[0], labels, seen.pending)
        return [*counters, failure, pending]


def _failures(seen: ModelStatistics) -> Iterable[tuple[str, int]]:
    """All four reasons, also those that nothing failed for."""
    yield "CANCELED", seen.cancel[0]
    for reason in FailureReason:
        yield reason.name, seen.failures.get(reason, 0)


def _us(duration: tuple[int, int]) -> int:
    return duration[1] // 1000
