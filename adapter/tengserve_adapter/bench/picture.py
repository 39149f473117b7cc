"""Throughput against latency as SVG: one row of panels a workload, one curve a system, one point a load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tengserve_adapter.bench.chart import Panel, Point, svg
from tengserve_adapter.bench.figures import Sample
from tengserve_adapter.bench.summary import Figure, Row


def _ttft(one: Sample) -> float:
    return one.ttft.p50 * 1e3


def _tpot(one: Sample) -> float:
    return one.tpot.p50 * 1e3


_PANELS: Final[tuple[tuple[str, Figure], ...]] = (("TTFT p50, ms", _ttft), ("TPOT p50, ms", _tpot))


def draw(rows: Sequence[Row]) -> str:
    """The picture of all rows that count; a point is named after its load."""
    valid = [row for row in rows if row.valid]
    systems = list(dict.fromkeys(row.system for row in rows))
    panels = [
        [
            _panel(f"{workload}: {title}", [row for row in valid if row.workload == workload], systems, figure)
            for title, figure in _PANELS
        ]
        for workload in dict.fromkeys(row.workload for row in valid)
    ]
    return svg(systems, panels)


def _panel(title: str, rows: Sequence[Row], systems: Sequence[str], figure: Figure) -> Panel:
    def point(row: Row) -> Point:
        # Only clients make a curve: more of them is the next point. A rate is a point of its own.
        alone = not row.load.startswith("c")
        return Point(row.median(lambda one: one.output_per_s), row.median(figure), row.load, alone=alone)

    curves = {system: [point(row) for row in rows if row.system == system] for system in systems}
    return Panel(title, "output tokens/s", curves)
