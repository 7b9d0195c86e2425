"""Figures as people read them: in units, never in powers of ten. Stdlib only."""

from __future__ import annotations

from typing import Final

_BYTES: Final = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_TIMES: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_LONG_S: Final = 7200.0
_SPANS: Final = ((3 * 86_400.0, 86_400.0, "d"), (3 * 3600.0, 3600.0, "h"), (900.0, 60.0, "min"))


def number(value: float) -> str:
    """Three digits, or all of those before the point: ``0.125``, ``12.5``, ``1,250``."""
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def seconds(value: float | None) -> str:
    """``1.25 s``, ``125 ms``, ``2.5 h``; ``-`` where it is not known."""
    if value is None:
        return "-"
    if abs(value) >= _LONG_S:
        return f"{number(value / 3600.0)} h"
    return _scaled(value, _TIMES, 1.0, "s")


def size(value: float) -> str:
    """Of bytes: ``1.4 GB``."""
    return _scaled(value, _BYTES, 1.0, "B")


def label(value: float, unit: str) -> str:
    """Of a value axis. ``unit``: ``s``, ``B``, or one that stands behind the number as it is."""
    if unit == "s":
        return seconds(value)
    return size(value) if unit == "B" else f"{number(value)} {unit}".rstrip()


def span(value_s: float, end_s: float) -> str:
    """A moment of a time axis that ends at ``end_s``, in the unit that suits the whole of it."""
    for least_s, unit_s, name in _SPANS:
        if end_s >= least_s:
            return f"{number(value_s / unit_s)} {name}"
    return f"{number(value_s)} s"


def _scaled(value: float, units: tuple[tuple[float, str], ...], usual: float, name: str) -> str:
    """In the largest unit that makes it one or more."""
    for factor, unit in units:
        if abs(value) >= 0.9995 * factor:
            return f"{number(value / factor)} {unit}"
    factor, unit = units[-1] if value and units[-1][0] < usual else (usual, name)
    return f"{number(value / factor)} {unit}"
