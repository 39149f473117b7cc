"""Metrics of a user's model, on the server's own page of metrics.

A family belongs to the models whose instances made it; those that name the same family share it. It leaves the page
when the last of them is unloaded. Names and labels are bounded, as the page and its scraper are everybody's.
"""

from __future__ import annotations

import bisect
import enum
import itertools
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector, CollectorRegistry

from tengserve_backend.python_backend.api.errors import TritonModelException

MAX_FAMILIES = 100
"""Of one model."""
MAX_METRICS = 1000
"""Of one family."""

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]{0,199}", re.ASCII)
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,99}", re.ASCII)
_MAX_LABELS = 20
_MAX_VALUE_CHARS = 200
_MAX_BUCKETS = 100


class MetricKind(enum.Enum):
    """Triton's kinds."""

    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2


class Metric:
    """One time series of a family."""

    def __init__(self, kind: MetricKind, labels: Mapping[str, str], buckets: Sequence[float]) -> None:
        self._kind = kind
        self._lock = threading.Lock()
        self._value = 0.0
        self._buckets = tuple(buckets)
        self._counts = [0] * (len(buckets) + 1)
        self.labels = dict(labels)

    def increment(self, value: float) -> None:
        """Add to a counter or a gauge.

        Raises:
            TritonModelException: it is another kind, or a counter would fall.
        """
        self._check("increment", MetricKind.COUNTER, MetricKind.GAUGE)
        if self._kind is MetricKind.COUNTER and value < 0:
            raise TritonModelException("Failed to increment metric value: a counter cannot be decremented")
        with self._lock:
            self._value += value

    def set(self, value: float) -> None:
        """Set a gauge.

        Raises:
            TritonModelException: it is another kind.
        """
        self._check("set", MetricKind.GAUGE)
        with self._lock:
            self._value = float(value)

    def observe(self, value: float) -> None:
        """Add an observation to a histogram.

        Raises:
            TritonModelException: it is another kind.
        """
        self._check("observe", MetricKind.HISTOGRAM)
        with self._lock:
            self._value += value
            self._counts[bisect.bisect_left(self._buckets, value)] += 1

    def value(self) -> float:
        """Of a counter or a gauge.

        Raises:
            TritonModelException: it is a histogram.
        """
        self._check("get", MetricKind.COUNTER, MetricKind.GAUGE)
        with self._lock:
            return self._value

    def add_to(self, family: Family, names: Sequence[str]) -> None:
        """Put it on the page; not part of the API."""
        values = [self.labels.get(name, "") for name in names]
        with self._lock:
            total, counts = self._value, list(self._counts)
        if isinstance(family, HistogramMetricFamily):
            reached, buckets = 0, []
            for bound, count in zip([*map(_bound, self._buckets), "+Inf"], counts, strict=True):
                reached += count
                buckets.append((bound, float(reached)))
            family.add_metric(values, buckets, total)
        elif isinstance(family, CounterMetricFamily | GaugeMetricFamily):
            family.add_metric(values, total)
        else:
            family.add_sample(family.name, dict(zip(names, values, strict=True)), total)

    def _check(self, what: str, *kinds: MetricKind) -> None:
        if self._kind not in kinds:
            raise TritonModelException(f"Failed to {what} metric value: not supported for a {self._kind.name.lower()}")


@dataclass(slots=True)
class _Family:
    name: str
    description: str
    kind: MetricKind
    owners: set[ModelMetrics]
    metrics: list[tuple[Metric, set[ModelMetrics]]] = field(default_factory=list)


class Page(Collector):
    """The families of all models. On the registry's page while there is any.

    Args:
        registry: the server's.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._lock = threading.Lock()
        self._families: dict[str, _Family] = {}
        self._registered = False

    def describe(self) -> Iterable[Family]:
        """Nothing: so the registry does not collect while it registers."""
        return []

    def collect(self) -> Iterable[Family]:
        """See Collector."""
        with self._lock:
            families = [(family, [metric for metric, _ in family.metrics]) for family in self._families.values()]
        for family, metrics in families:
            names = sorted({name for metric in metrics for name in metric.labels})
            made = _page_family(family, names)
            for metric in metrics:
                metric.add_to(made, names)
            yield made

    def family(self, owner: ModelMetrics, name: str, description: str, kind: MetricKind) -> _Family:
        """The family of that name, made when there is none."""
        others = {family.name for family in self._registry.collect()}
        with self._lock:
            known = self._families.get(name)
            if known is None:
                if name.removesuffix("_total") in others:
                    raise TritonModelException(f"Error when creating MetricFamily: '{name}' is the server's own")
                if sum(owner in family.owners for family in self._families.values()) >= MAX_FAMILIES:
                    raise TritonModelException(f"Error when creating MetricFamily: there are {MAX_FAMILIES} already")
                known = self._families[name] = _Family(name, description, kind, {owner})
            if known.kind is not kind:
                raise TritonModelException(f"Error when creating MetricFamily: '{name}' is of another kind")
            known.owners.add(owner)
            register, self._registered = not self._registered, True
        if register:
            self._registry.register(self)
        return known

    def metric(self, owner: ModelMetrics, family: _Family, labels: dict[str, str], buckets: list[float]) -> Metric:
        """The family's metric with these labels, made when there is none."""
        with self._lock:
            for metric, owners in family.metrics:
                if metric.labels == labels:
                    owners.add(owner)
                    return metric
            if len(family.metrics) >= MAX_METRICS:
                raise TritonModelException(f"Error when creating Metric: the family has {MAX_METRICS} already")
            made = Metric(family.kind, labels, buckets)
            family.metrics.append((made, {owner}))
            return made

    def leave(self, owner: ModelMetrics) -> None:
        """Forget what only this model has."""
        with self._lock:
            for family in list(self._families.values()):
                family.owners.discard(owner)
                for _, owners in family.metrics:
                    owners.discard(owner)
                family.metrics = [(metric, owners) for metric, owners in family.metrics if owners]
                if not family.owners:
                    del self._families[family.name]
            unregister = self._registered and not self._families
            self._registered = self._registered and not unregister
        if unregister:
            self._registry.unregister(self)


_PAGE = Page(REGISTRY)


class ModelMetrics:
    """What one model has on the page; until `close`.

    Args:
        page: where.
    """

    def __init__(self, page: Page = _PAGE) -> None:
        self._page = page

    def family(self, name: str, description: str, kind: MetricKind) -> _Family:
        """The family of that name, made when there is none; models that name the same family share it.

        Raises:
            TritonModelException: the name is none, is taken, or there are too many families.
        """
        if not isinstance(name, str) or not _NAME.fullmatch(name) or not isinstance(kind, MetricKind):
            raise TritonModelException(f"Error when creating MetricFamily: '{name}' is no name, or {kind} no kind")
        return self._page.family(self, name, str(description)[:500], kind)

    def metric(self, family: _Family, labels: object, buckets: object) -> Metric:
        """The family's metric with these labels, made when there is none.

        Raises:
            TritonModelException: labels or buckets are none, or there are too many.
        """
        return self._page.metric(self, family, _labels(labels), _buckets(family.kind, buckets))

    def close(self) -> None:
        """Leave the page. Harmless when called again."""
        self._page.leave(self)


def _page_family(family: _Family, labels: Sequence[str]) -> Family:
    if family.kind is MetricKind.HISTOGRAM:
        return HistogramMetricFamily(family.name, family.description, labels=labels)
    if family.kind is MetricKind.GAUGE:
        return GaugeMetricFamily(family.name, family.description, labels=labels)
    if family.name.endswith("_total"):
        return CounterMetricFamily(family.name, family.description, labels=labels)
    # The client library would add "_total" to a counter's name; a model's dashboards know the name that it chose.
    return Family(family.name, family.description, "unknown")


def _bound(bound: float) -> str:
    """As Triton prints it: 1 and not 1.0."""
    return str(int(bound)) if bound.is_integer() else str(bound)


def _labels(labels: object) -> dict[str, str]:
    if labels is None:
        return {}
    if not isinstance(labels, dict):
        raise TritonModelException("Failed to create metric. Labels must be a dictionary.")
    if len(labels) > _MAX_LABELS or not all(isinstance(name, str) and _LABEL.fullmatch(name) for name in labels):
        raise TritonModelException("Failed to create metric. Labels must be named like variables, and be few.")
    return {name: str(value)[:_MAX_VALUE_CHARS] for name, value in labels.items()}


def _buckets(kind: MetricKind, buckets: object) -> list[float]:
    if buckets is None and kind is not MetricKind.HISTOGRAM:
        return []
    if not isinstance(buckets, list):
        raise TritonModelException("Failed to create metric. Buckets must be a list.")
    if kind is not MetricKind.HISTOGRAM:
        raise TritonModelException("Failed to create metric. Unexpected buckets found.")
    bounds = [float(bound) for bound in buckets]
    if len(bounds) > _MAX_BUCKETS or any(low >= high for low, high in itertools.pairwise(bounds)):
        raise TritonModelException("Failed to create metric. Buckets must ascend, and be few.")
    return bounds
