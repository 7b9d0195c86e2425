"""What it means that memory is flat: hardly any rise over the last half of a run, whatever happened before."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import linear_regression, median
from typing import Final

_PARTS: Final = 10


def rise_mb(values: Sequence[int]) -> float | None:
    """By how many megabytes a straight line rises over the last half of the readings (bytes, evenly spaced): the least
    squares one through the medians of ten equal parts of it. Medians, so that a short peak is no rise; the last half,
    so that what fills up once (caches, rings of fixed size) is none either. None for too few readings to tell.
    """
    half = values[len(values) // 2 :]
    if len(half) < _PARTS:
        return None
    medians = [median(half[len(half) * i // _PARTS : len(half) * (i + 1) // _PARTS]) for i in range(_PARTS)]
    return round(linear_regression(range(_PARTS), medians).slope * _PARTS / 1e6, 2)
