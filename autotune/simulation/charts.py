"""Line and stacked charts as inline SVG: a report is one file that opens anywhere. Stdlib only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from autotune.simulation import units

WIDTH, HEIGHT = 860, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 10, 24
COLOURS = ("#2f6db5", "#d8742c", "#3a9a5b", "#a34bb0", "#b03a3a", "#6b6b6b")


@dataclass(frozen=True)
class Line:
    """A series over the chart's times; None is a gap."""

    label: str
    values: Sequence[float | None]
    dashed: bool = False


@dataclass(frozen=True)
class Axes:
    """What is along, by default times in seconds, and the range of values; ``unit`` and ``along``: see
    :func:`autotune.simulation.units.label`. ``log``: a logarithmic value axis.
    """

    times: Sequence[float]
    low: float
    high: float
    unit: str
    along: str = "s"
    log: bool = False

    def x(self, at: float) -> float:
        start, end = self.times[0], self.times[-1]
        return _LEFT + (at - start) / ((end - start) or 1.0) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log(max(value, low)), math.log(low), math.log(high)
        share = (min(value, high) - low) / ((high - low) or 1.0)
        return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)


def line_chart(
    times: Sequence[float],
    lines: Sequence[Line],
    unit: str,
    *,
    log: bool = False,
    marks: Sequence[tuple[float, str]] = (),
    level: float | None = None,
    along: str = "s",
) -> str:
    """Lines over time, or over what has the unit ``along``. ``marks``: moments with a hint shown on hover. ``level``: a
    horizontal line, a target say.
    """
    known = [value for line in lines for value in line.values if value is not None]
    if not times or not known:
        return "<p>nothing happened</p>"
    wanted = [*known, *([level] if level is not None else [])]
    low = min(value for value in wanted if value > 0) if log and any(value > 0 for value in wanted) else 0.0
    axes = Axes(times, low, (max(*wanted, low * 1.01) or 1.0) * 1.05, unit, along, log=log and low > 0)
    parts = [_frame(axes)]
    if level is not None:
        height = axes.y(level)
        parts.append(f'<path d="M{_LEFT} {height:.1f}H{WIDTH - _RIGHT}" stroke="#999" stroke-dasharray="2 3"/>')
    parts += [_marks(axes, marks)]
    for number, line in enumerate(lines):
        dash = ' stroke-dasharray="5 3"' if line.dashed else ""
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<path d="{_path(axes, line.values)}" fill="none" stroke="{colour}" stroke-width="1.4"{dash}/>')
    return _svg(parts) + _legend([line.label for line in lines])


def stacked_chart(
    times: Sequence[float],
    layers: Sequence[Line],
    unit: str,
    *,
    top: float | None = None,
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """Layers on top of each other. ``top``: the end of the value axis, a capacity say."""
    if not times:
        return "<p>nothing happened</p>"
    sums = [0.0] * len(times)
    bounds = [list(sums)]
    for layer in layers:
        sums = [total + (value or 0.0) for total, value in zip(sums, layer.values, strict=True)]
        bounds.append(list(sums))
    axes = Axes(times, 0.0, (max(top or 0.0, *sums) or 1.0) * 1.02, unit)
    parts = [_frame(axes)]
    for number, (below, above) in enumerate(pairwise(bounds)):
        there = [f"{axes.x(at):.1f} {axes.y(value):.1f}" for at, value in zip(times, above, strict=True)]
        back = [f"{axes.x(at):.1f} {axes.y(value):.1f}" for at, value in zip(times, below, strict=True)]
        shape = "L".join([*there, *reversed(back)])
        parts.append(f'<path d="M{shape}Z" fill="{COLOURS[number % len(COLOURS)]}" fill-opacity="0.75"/>')
    return _svg([*parts, _marks(axes, marks)]) + _legend([layer.label for layer in layers])


def _path(axes: Axes, values: Sequence[float | None]) -> str:
    steps, pen_up = [], True
    for at, value in zip(axes.times, values, strict=True):
        if value is None:
            pen_up = True
            continue
        steps.append(f"{'M' if pen_up else 'L'}{axes.x(at):.1f} {axes.y(value):.1f}")
        pen_up = False
    return "".join(steps)


def _marks(axes: Axes, marks: Sequence[tuple[float, str]]) -> str:
    return "".join(
        f'<path d="M{axes.x(at):.1f} {_TOP}V{HEIGHT - _BOTTOM}" stroke="#000" stroke-opacity="0.35" '
        f'stroke-width="1.5"><title>{escape(f"{at:.0f} s: {text}")}</title></path>'
        for at, text in marks
        if axes.times[0] <= at <= axes.times[-1]
    )


def _frame(axes: Axes) -> str:
    bottom, end = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    start_s, end_s = axes.times[0], axes.times[-1]
    parts = [f'<path d="M{_LEFT} {_TOP}V{bottom}H{end}" fill="none" stroke="#333"/>']
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        at = start_s + share * (end_s - start_s)
        # The last one ends where the figure does, or it would be cut off.
        text = units.span(at, end_s) if axes.along == "s" else units.label(at, axes.along)
        parts.append(_text(axes.x(at), HEIGHT - 8, text, "end" if share == 1.0 else "middle"))
        value = axes.low * (axes.high / axes.low) ** share if axes.log else axes.low + share * (axes.high - axes.low)
        height = axes.y(value)
        parts.append(f'<path d="M{_LEFT} {height:.1f}H{end}" stroke="#ddd"/>')
        parts.append(_text(_LEFT - 5, height + 4, units.label(value, axes.unit), "end"))
    return "".join(parts)


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="11" fill="#444">{escape(text)}</text>'


def _legend(labels: Sequence[str]) -> str:
    items = "".join(
        f'<span><i style="background:{COLOURS[number % len(COLOURS)]}"></i>{escape(label)}</span>'
        for number, label in enumerate(labels)
    )
    return f'<div class="legend">{items}</div>'


def _svg(parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img">{"".join(parts)}</svg>'
