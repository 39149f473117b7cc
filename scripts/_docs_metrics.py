"""docs/metrics.md, made from the tables of the metrics."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Counter

from tengserve_adapter.http.endpoints import IGNORED_FIELDS, IGNORED_FIELDS_LABELS
from tengserve_adapter.observability import metrics, triton_metrics

_HEAD = """# Metrics

<!-- Made by scripts/docs from tengserve_adapter/observability/metrics.py, triton_metrics.py; change these instead. -->

`GET /metrics` answers in Prometheus' text format, beside the metrics of the Python process. Times are in seconds.
Counters and histograms of a model start anew when it is loaded; each histogram has `_bucket`, `_sum` and `_count`.

| metric | kind | labels | meaning |
| --- | --- | --- | --- |
"""

_TAIL = """
The names that begin with `nv_inference_` are Triton's, for dashboards and autoscalers that know them. They are the
[statistics](protocols/v2.md) of each model that is ready, of an LLM those of all its requests, whatever the protocol.
A failed request has no duration. A model that is unloaded has none of these series, and begins at 0 when it is loaded
again. The counters among them are `untyped` on the page, as their names do not end in `_total`; `rate()` takes them all
the same.

`route` is the pattern of the URL, never what a client wrote into it; `other` is every URL that has none.
"""

_PREFIX = "tengserve_"


def render() -> dict[str, str]:
    """The pages by their path from the root of the repository."""
    rows = sorted(
        f"| `{name}` | {kind} | {', '.join(f'`{label}`' for label in labels)} | {text} |\n"
        for name, kind, labels, text in _rows()
    )
    return {"docs/metrics.md": _HEAD + "".join(rows) + _TAIL}


def _rows() -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    for name, text in (metrics.READY, *((name, text) for name, text, _ in metrics.GAUGES)):
        yield _PREFIX + name, "gauge", metrics.LABELS, text
    name, text = metrics.INFO
    yield _PREFIX + name, "gauge", metrics.INFO_LABELS, text
    for name, text, _ in metrics.COUNTERS:
        yield f"{_PREFIX}{name}_total", "counter", metrics.LABELS, text
    for name, text, _ in metrics.HISTOGRAMS:
        yield _PREFIX + name, "histogram", metrics.LABELS, text
    for (name, text), labels in (
        (metrics.FINISHED, metrics.FINISHED_LABELS),
        (metrics.PHASE_SECONDS, metrics.PHASE_LABELS),
    ):
        yield f"{_PREFIX}{name}_total", "counter", labels, text
    for name, text, _ in triton_metrics.COUNTERS:
        yield name, "counter", triton_metrics.LABELS, text
    name, text = triton_metrics.FAILURE
    yield name, "counter", triton_metrics.FAILURE_LABELS, text
    name, text = triton_metrics.PENDING
    yield name, "gauge", triton_metrics.LABELS, text
    yield _counter(metrics.REQUESTS, metrics.REQUESTS_LABELS)
    yield _counter(metrics.GRPC_REQUESTS, metrics.GRPC_REQUESTS_LABELS)
    yield _counter(IGNORED_FIELDS, IGNORED_FIELDS_LABELS)


def _counter(counter: Counter, labels: tuple[str, ...]) -> tuple[str, str, tuple[str, ...], str]:
    (metric,) = counter.describe()
    return f"{metric.name}_total", "counter", labels, metric.documentation
