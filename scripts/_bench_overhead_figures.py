"""The arithmetic of `scripts/bench overhead`: from latencies to a sample, from samples to a row of the table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tengserve_adapter.bench.figures import percentile


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured.

    Attributes:
        route: json, binary or grpc.
        elements: FP32 values of the tensor, whose shape is [1, elements].
        concurrency: requests at once.
    """

    route: str
    elements: int
    concurrency: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement of one server, or the medians of several.

    Attributes:
        per_second: answers a second.
        p50_ms, p99_ms: latencies.
    """

    per_second: float
    p50_ms: float
    p99_ms: float


def sample(latencies_s: Sequence[float], wall_s: float) -> Sample:
    """The figures of a measurement.

    Args:
        latencies_s: of every answer, in seconds; at least one.
        wall_s: how long it took to get them all.
    """
    ordered = sorted(latencies_s)
    return Sample(len(ordered) / wall_s, percentile(ordered, 0.5) * 1e3, percentile(ordered, 0.99) * 1e3)


def summary(samples: Sequence[Sample]) -> Sample:
    """Of each figure the median."""
    return Sample(
        *(
            statistics.median(values)
            for values in zip(*((one.per_second, one.p50_ms, one.p99_ms) for one in samples), strict=True)
        )
    )


_COLUMNS = ("route", "values", "at once", "requests/s", "ratio", "p50 ms", "ratio", "p99 ms")
_WIDTHS = (6, 6, 7, 17, 5, 15, 5, 15)


def heading() -> str:
    """The first two lines of the table, in Markdown."""
    return _line(_COLUMNS) + "\n" + _line(["-" * width for width in _WIDTHS])


def row(case: Case, ours: Sample, stock: Sample) -> str:
    """One line of the table; ratios are ours to stock's, so that more is better for requests and less for latency."""
    return _line(
        (
            case.route,
            str(case.elements),
            str(case.concurrency),
            f"{ours.per_second:.0f} / {stock.per_second:.0f}",
            f"{ours.per_second / stock.per_second:.2f}",
            f"{ours.p50_ms:.2f} / {stock.p50_ms:.2f}",
            f"{ours.p50_ms / stock.p50_ms:.2f}",
            f"{ours.p99_ms:.2f} / {stock.p99_ms:.2f}",
        )
    )


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True)) + " |"
