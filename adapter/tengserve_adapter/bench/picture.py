"""Throughput against latency as SVG: one row of panels a workload, one curve a system, one point a load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Final

from tengserve_adapter.bench.figures import Sample
from tengserve_adapter.bench.summary import Figure, Row

_WIDTH: Final = 420
_HEIGHT: Final = 280
_LEFT: Final = 56
_BOTTOM: Final = 44
_TOP: Final = 34
_RIGHT: Final = 16
_LEGEND: Final = 24
_COLORS: Final = ("#0b62c4", "#d1480f", "#1b8a3a", "#8a2be2", "#9a7b00", "#00818a", "#c2185b", "#555555")
_TICKS: Final = 5


def _ttft(one: Sample) -> float:
    return one.ttft.p50 * 1e3


def _tpot(one: Sample) -> float:
    return one.tpot.p50 * 1e3


_PANELS: Final[tuple[tuple[str, Figure], ...]] = (("TTFT p50, ms", _ttft), ("TPOT p50, ms", _tpot))


def draw(rows: Sequence[Row]) -> str:
    """The picture of all rows that count; a point is named after its load."""
    valid = [row for row in rows if row.valid]
    workloads = list(dict.fromkeys(row.workload for row in valid))
    systems = list(dict.fromkeys(row.system for row in rows))
    colors = {system: _COLORS[index % len(_COLORS)] for index, system in enumerate(systems)}
    width, height = _WIDTH * len(_PANELS), _HEIGHT * len(workloads) + _LEGEND
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        ' font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for index, system in enumerate(systems):
        x = _LEFT + index * 130
        parts.append(f'<rect x="{x}" y="8" width="10" height="10" fill="{colors[system]}"/>')
        parts.append(_text(x + 14, 17, system))
    for line, workload in enumerate(workloads):
        for column, (title, figure) in enumerate(_PANELS):
            here = [row for row in valid if row.workload == workload]
            origin = (column * _WIDTH, _LEGEND + line * _HEIGHT)
            parts += _Panel(origin, f"{workload}: {title}", figure, here, colors).draw()
    return "\n".join([*parts, "</svg>"]) + "\n"


class _Panel:
    def __init__(
        self, origin: tuple[int, int], title: str, figure: Figure, rows: Sequence[Row], colors: dict[str, str]
    ) -> None:
        self._x0, self._y0 = origin
        self._title = title
        self._rows = rows
        self._colors = colors
        self._points = [(row, row.median(lambda one: one.output_per_s), row.median(figure)) for row in rows]
        self._step_x = _step(max(x for _, x, _ in self._points))
        self._step_y = _step(max(y for _, _, y in self._points))

    def draw(self) -> list[str]:
        parts = [_text(self._x0 + _LEFT, self._y0 + 20, self._title, weight="bold")]
        left, right = self._x(0), self._x(_TICKS * self._step_x)
        bottom, top = self._y(0), self._y(_TICKS * self._step_y)
        for tick in range(_TICKS + 1):
            x, y = self._x(tick * self._step_x), self._y(tick * self._step_y)
            parts.append(f'<path d="M{left} {y}H{right}M{x} {bottom}V{top}" stroke="#dddddd" fill="none"/>')
            parts.append(_text(x, bottom + 14, f"{tick * self._step_x:g}", anchor="middle"))
            parts.append(_text(left - 5, y + 4, f"{tick * self._step_y:g}", anchor="end"))
        parts.append(_text((left + right) / 2, bottom + 30, "output tokens/s", anchor="middle"))
        for system, color in self._colors.items():
            mine = [(row.load, self._x(x), self._y(y)) for row, x, y in self._points if row.system == system]
            # Only clients make a curve: more of them is the next point. A rate is a point of its own.
            curve = " ".join(f"{x},{y}" for load, x, y in mine if load.startswith("c"))
            parts.append(f'<polyline points="{curve}" fill="none" stroke="{color}" stroke-width="1.5"/>')
            for load, x, y in mine:
                fill = color if load.startswith("c") else "white"
                parts.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{fill}" stroke="{color}"/>')
                parts.append(_text(x + 5, y - 5, load, color=color))
        return parts

    def _x(self, value: float) -> float:
        share = value / (_TICKS * self._step_x)
        return round(self._x0 + _LEFT + share * (_WIDTH - _LEFT - _RIGHT), 1)

    def _y(self, value: float) -> float:
        share = value / (_TICKS * self._step_y)
        return round(self._y0 + _HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - _TOP), 1)


def _step(most: float) -> float:
    """A round distance between ticks, so that five of them reach beyond the greatest value."""
    if most <= 0:
        return 1.0
    rough = most * 1.05 / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal", color: str = "#222222"
) -> str:
    return (
        f'<text x="{round(x, 1)}" y="{round(y, 1)}" text-anchor="{anchor}" font-weight="{weight}" fill="{color}">'
        f"{escape(text)}</text>"
    )
