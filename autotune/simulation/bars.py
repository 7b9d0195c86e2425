"""Horizontal bars with intervals as inline SVG. Stdlib only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from autotune.simulation.charts import COLOURS, WIDTH
from autotune.simulation.units import number

_ROW, _RIGHT = 24, 90
_LEAST_LEFT, _MOST_LEFT, _CHAR = 250, 430, 6.6  # of labels, and what a character takes


@dataclass(frozen=True)
class Bar:
    """``low`` and ``high``: the ends of its interval, None without one. A value that is not known has no bar."""

    label: str
    value: float | None
    low: float | None = None
    high: float | None = None


def bar_chart(bars: Sequence[Bar], *, mark: float | None = None) -> str:
    """Bars from 0, or leftwards from it where negative. ``mark``: a vertical line, a base say."""
    ends = [x for bar in bars for x in (bar.value, bar.low, bar.high, mark, 0.0) if x is not None and math.isfinite(x)]
    if not bars or not ends:
        return "<p>nothing to show</p>"
    low, high = min(ends), max(ends)
    span = (high - low) or 1.0
    left_of = _room(bars)

    def x(value: float) -> float:
        return left_of + (value - low) / span * (WIDTH - left_of - _RIGHT)

    height = _ROW * len(bars) + 8
    parts = [f'<path d="M{x(0.0):.1f} 0V{height}" stroke="#333"/>']
    if mark is not None:
        parts.append(f'<path d="M{x(mark):.1f} 0V{height}" stroke="#999" stroke-dasharray="2 3"/>')
    for place, bar in enumerate(bars):
        top = _ROW * place + 5
        middle = top + 8
        parts.append(_label(left_of - 8, middle + 4, bar.label, left_of))
        if bar.value is None or not math.isfinite(bar.value):
            parts.append(_text(left_of + 4, middle + 4, "not known", "start"))
            continue
        left, right = sorted((x(0.0), x(bar.value)))
        parts.append(f'<rect x="{left:.1f}" y="{top}" width="{right - left:.1f}" height="15" fill="{COLOURS[0]}"/>')
        if bar.low is not None and bar.high is not None and math.isfinite(bar.low + bar.high):
            parts.append(f'<path d="M{x(bar.low):.1f} {middle}H{x(bar.high):.1f}" stroke="#000" stroke-width="1.5"/>')
        parts.append(_text(WIDTH - _RIGHT + 6, middle + 4, number(bar.value), "start"))
    return f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img">{"".join(parts)}</svg>'


def _room(bars: Sequence[Bar]) -> float:
    """Pixels for the longest label, within bounds."""
    return min(_MOST_LEFT, max(_LEAST_LEFT, 12 + _CHAR * max(len(bar.label) for bar in bars)))


def _label(x: float, y: float, text: str, room: float) -> str:
    """What does not fit loses its middle, and shows all of it on hover."""
    most = int((room - 12) / _CHAR)
    if len(text) <= most:
        return _text(x, y, text, "end")
    half = (most - 1) // 2
    short = _text(x, y, f"{text[: most - 1 - half]}\u2026{text[-half:]}", "end")
    return f"<g><title>{escape(text)}</title>{short}</g>"


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="12" fill="#333">{escape(text)}</text>'
