"""Charts as SVG: panels in rows, each with curves over round ticks; five of them an axis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

_WIDTH: Final = 420
_HEIGHT: Final = 280
_LEFT: Final = 56
_BOTTOM: Final = 44
_TOP: Final = 34
_RIGHT: Final = 16
_LEGEND: Final = 24
_COLORS: Final = ("#0b62c4", "#d1480f", "#1b8a3a", "#8a2be2", "#9a7b00", "#00818a", "#c2185b", "#555555")
_TICKS: Final = 5


@dataclass(frozen=True, slots=True)
class Point:
    """One value.

    Attributes:
        x, y: not negative.
        label: written beside it.
        alone: it is no part of its curve.
    """

    x: float
    y: float
    label: str = ""
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes.

    Attributes:
        title: above it.
        x_title: below its horizontal axis.
        curves: points by the name of their curve; there is at least one point.
    """

    title: str
    x_title: str
    curves: Mapping[str, Sequence[Point]]


def svg(names: Sequence[str], rows: Sequence[Sequence[Panel]]) -> str:
    """A picture.

    Args:
        names: of the curves, for the legend; a curve has the same colour in every panel.
        rows: panels, row by row.
    """
    colors = {name: _COLORS[index % len(_COLORS)] for index, name in enumerate(names)}
    width, height = _WIDTH * max((len(row) for row in rows), default=2), _HEIGHT * len(rows) + _LEGEND
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        ' font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for index, name in enumerate(names):
        x = _LEFT + index * 130
        parts.append(f'<rect x="{x}" y="8" width="10" height="10" fill="{colors[name]}"/>')
        parts.append(_text(x + 14, 17, name))
    for line, row in enumerate(rows):
        for column, panel in enumerate(row):
            parts += _Drawing((column * _WIDTH, _LEGEND + line * _HEIGHT), panel, colors).draw()
    return "\n".join([*parts, "</svg>"]) + "\n"


class _Drawing:
    def __init__(self, origin: tuple[int, int], panel: Panel, colors: Mapping[str, str]) -> None:
        self._x0, self._y0 = origin
        self._panel = panel
        self._colors = colors
        points = [point for curve in panel.curves.values() for point in curve]
        self._step_x = _step(max(point.x for point in points))
        self._step_y = _step(max(point.y for point in points))

    def draw(self) -> list[str]:
        parts = [_text(self._x0 + _LEFT, self._y0 + 20, self._panel.title, weight="bold")]
        left, right = self._x(0), self._x(_TICKS * self._step_x)
        bottom, top = self._y(0), self._y(_TICKS * self._step_y)
        for tick in range(_TICKS + 1):
            x, y = self._x(tick * self._step_x), self._y(tick * self._step_y)
            parts.append(f'<path d="M{left} {y}H{right}M{x} {bottom}V{top}" stroke="#dddddd" fill="none"/>')
            parts.append(_text(x, bottom + 14, f"{tick * self._step_x:g}", anchor="middle"))
            parts.append(_text(left - 5, y + 4, f"{tick * self._step_y:g}", anchor="end"))
        parts.append(_text((left + right) / 2, bottom + 30, self._panel.x_title, anchor="middle"))
        for name, points in self._panel.curves.items():
            color = self._colors[name]
            curve = " ".join(f"{self._x(point.x)},{self._y(point.y)}" for point in points if not point.alone)
            parts.append(f'<polyline points="{curve}" fill="none" stroke="{color}" stroke-width="1.5"/>')
            for point in points:
                x, y = self._x(point.x), self._y(point.y)
                fill = "white" if point.alone else color
                parts.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{fill}" stroke="{color}"/>')
                if point.label:
                    parts.append(_text(x + 5, y - 5, point.label, color=color))
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
