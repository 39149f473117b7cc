"""Prometheus metrics on KServe's /metrics: answers by route and status, and every engine's own numbers.

Engine numbers are read when they are scraped, so the engine counts nothing twice and knows no Prometheus. The
tables here are those of docs/metrics.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY, Counter, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tengserve_adapter.protocols.call import FINISH_REASONS
from tengserve_backend.engine.base import EngineStatus
from tengserve_backend.engine.statistics import Histogram, Statistics
from tengserve_backend.errors import TengserveError
from tengserve_backend.execution.step_profile import Phase
from tengserve_backend.repository.manager import ModelManager, ModelState

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUESTS_LABELS = ("route", "status")
REQUESTS = Counter(
    "tengserve_http_requests",
    "Answers by route and status; 499 when the client left before the answer began.",
    REQUESTS_LABELS,
)
_CLIENT_LEFT = 499
GRPC_REQUESTS_LABELS = ("method", "code")
GRPC_REQUESTS = Counter(
    "tengserve_grpc_requests",
    "Requests over gRPC by method and status code; each request of a stream is one.",
    GRPC_REQUESTS_LABELS,
)

LABELS = ("model", "version")
READY = ("model_ready", "1 when the model can answer.")
INFO = (
    "model_info",
    "1; how the model runs now: quantization is that of its weights, or none; fused names its fused operators, with "
    "commas between them.",
)
INFO_LABELS = (*LABELS, "device", "dtype", "quantization", "attention", "fused")
PHASE_SECONDS = (
    "step_phase_seconds",
    f"Time of steps by phase, with --step-profile: {', '.join(phase.value for phase in Phase)}.",
)
PHASE_LABELS = (*LABELS, "phase")
FINISHED = ("finished_requests", f"Complete answers by finish reason: {', '.join(FINISH_REASONS.values())}.")
FINISHED_LABELS = (*LABELS, "reason")
GAUGES: tuple[tuple[str, str, Callable[[EngineStatus], float]], ...] = (
    ("waiting_requests", "Requests admitted and not started.", lambda status: status.waiting_requests),
    ("waiting_tokens", "Prompt tokens of the requests that wait.", lambda status: status.waiting_tokens),
    ("running_requests", "Requests that hold cache blocks.", lambda status: status.running_requests),
    ("kv_cache_blocks", "Blocks of the KV cache.", lambda status: status.total_blocks),
    ("kv_cache_free_blocks", "Blocks of the KV cache that hold nothing.", lambda status: status.free_blocks),
    ("kv_cache_idle_blocks", "Blocks that no request holds, kept for their content.", lambda s: s.cached_blocks),
    ("seconds_since_step", "Since the last step while there is work; 0 when idle.", lambda s: s.seconds_since_step),
)
COUNTERS: tuple[tuple[str, str, Callable[[EngineStatus], float]], ...] = (
    ("steps", "Steps of the engine.", lambda status: status.steps),
    ("preemptions", "Requests put back to waiting for want of cache blocks.", lambda status: status.preemptions),
    ("prefix_asked_tokens", "Tokens of the requests that started.", lambda status: status.prefix_asked_tokens),
    ("prefix_hit_tokens", "Tokens of these that were found in the KV cache.", lambda s: s.prefix_hit_tokens),
    ("prompt_tokens", "Tokens of the prompts that started.", lambda status: status.statistics.prompt_tokens),
    ("generated_tokens", "Tokens generated.", lambda status: status.statistics.generated_tokens),
    ("failed_requests", "Requests that ended with an error of the server's.", lambda s: s.statistics.failed),
    ("aborted_requests", "Requests that were cancelled.", lambda status: status.statistics.aborted),
)
HISTOGRAMS: tuple[tuple[str, str, Callable[[Statistics], Histogram]], ...] = (
    ("queue_seconds", "From submission to the first step.", lambda s: s.queue_seconds),
    ("time_to_first_token_seconds", "From submission to the first token.", lambda s: s.first_token_seconds),
    ("time_per_output_token_seconds", "From one token of a request to its next.", lambda s: s.token_seconds),
    ("step_seconds", "Time of a step.", lambda s: s.step_seconds),
    ("step_sequences", "Sequences in a step.", lambda s: s.step_sequences),
    ("step_tokens", "Tokens computed in a step.", lambda s: s.step_tokens),
)


class EngineCollector(Collector):
    """Reads the models' states and engines at each scrape."""

    def __init__(self, models: ModelManager) -> None:
        self._models = models

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering the collector must not ask the engines."""
        return []

    def collect(self) -> Iterable[Metric]:
        """One gauge of readiness a model, and the numbers of every engine there is."""
        ready = GaugeMetricFamily(f"tengserve_{READY[0]}", READY[1], labels=LABELS)
        info = GaugeMetricFamily(f"tengserve_{INFO[0]}", INFO[1], labels=INFO_LABELS)
        gauges = [GaugeMetricFamily(f"tengserve_{name}", text, labels=LABELS) for name, text, _ in GAUGES]
        counters = [CounterMetricFamily(f"tengserve_{name}", text, labels=LABELS) for name, text, _ in COUNTERS]
        histograms = [HistogramMetricFamily(f"tengserve_{name}", text, labels=LABELS) for name, text, _ in HISTOGRAMS]
        finished = CounterMetricFamily(f"tengserve_{FINISHED[0]}", FINISHED[1], labels=FINISHED_LABELS)
        phases = CounterMetricFamily(f"tengserve_{PHASE_SECONDS[0]}", PHASE_SECONDS[1], labels=PHASE_LABELS)
        for model in self._models.statuses():
            labels = (model.name, model.version)
            ready.add_metric(labels, float(model.state is ModelState.READY))
            try:
                engine = self._models.engine(model.name, model.version)
                status = engine.status()
            except TengserveError:
                continue  # Not loaded: readiness is all there is to tell.
            runs = engine.info
            fused = ",".join(sorted(runs.fused))
            info.add_metric((*labels, runs.device, runs.dtype, runs.quantization, runs.attention_tier, fused), 1.0)
            for gauge, (_, _, read) in zip(gauges, GAUGES, strict=True):
                gauge.add_metric(labels, read(status))
            for counter, (_, _, read) in zip(counters, COUNTERS, strict=True):
                counter.add_metric(labels, read(status))
            for histogram, (_, _, read_histogram) in zip(histograms, HISTOGRAMS, strict=True):
                values = read_histogram(status.statistics)
                histogram.add_metric(labels, _buckets(values), values.total)
            for reason, count in status.statistics.finished.items():
                finished.add_metric((*labels, FINISH_REASONS[reason]), count)
            for phase, seconds in status.statistics.phase_seconds.items():
                phases.add_metric((*labels, phase), seconds)
        return [ready, info, *gauges, *counters, *histograms, finished, phases]


def quiet_metrics(unused: Iterable[Collector]) -> None:
    """Leave out of /metrics what tells nothing: the time at which each series began, and series that nobody fills."""
    disable_created_metrics()  # type: ignore[no-untyped-call]  # prometheus_client leaves it untyped
    for collector in unused:
        REGISTRY.unregister(collector)


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Cumulative, as Prometheus wants them."""
    bounds = [*map(str, histogram.bounds), "+Inf"]
    return list(zip(bounds, itertools.accumulate(histogram.counts), strict=True))


class RequestMetrics:
    """ASGI middleware that counts answers.

    The label is the route's template, never the path itself: clients must not be able to make new time series.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and count its answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = _CLIENT_LEFT

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            REQUESTS.labels(_route(scope), str(status)).inc()


def _route(scope: Scope) -> str:
    # FastAPI tells the route itself; of Starlette's own routes, which ours are, only the endpoint is told.
    route: Any = scope.get("route")
    endpoint = scope.get("endpoint")
    if route is None and endpoint is not None:
        route = next((one for one in scope["app"].routes if getattr(one, "endpoint", None) is endpoint), None)
    template = getattr(route, "path", None)
    return template if isinstance(template, str) and template else "other"
