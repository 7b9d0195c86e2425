"""Another engine's histogram in our logarithmic buckets, so that every figure is computed the same way from it."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from engine.stats import HISTOGRAM_BUCKETS, HISTOGRAM_GROWTH, Histogram

# As the shares and quantiles of a Histogram are counted: a bucket's values lie in its geometric middle.
_MIDDLES_S: Final = [Histogram.bound_s(index) / math.sqrt(HISTOGRAM_GROWTH) for index in range(HISTOGRAM_BUCKETS)]
# Of a first bucket that begins at 0: most of what it holds lies in its upper part, and nothing is known below.
_FIRST_BEGINS: Final = 0.25
_LARGEST: Final = 2**53


def rebinned(buckets: Sequence[tuple[float, float]], sum_s: float | None) -> Histogram | None:
    """``buckets``: (upper bound in seconds, values up to it), bounds ascending, the last one infinite, as a page has
    them. None where they cannot be true.

    A bucket's values are spread evenly over those of ours that lie inside it, always in the same turn, so that counts
    never fall from one reading to the next. Shares of values within one of its bounds stay exact; in between, a
    quantile is as good as the engine's own buckets are coarse.
    """
    if not buckets or not math.isinf(buckets[-1][0]) or sum_s is None or sum_s < 0:
        return None
    counts = [0] * HISTOGRAM_BUCKETS
    low_s, seen = 0.0, 0
    for bound_s, upto in buckets:
        if not 0 <= upto <= _LARGEST or bound_s < low_s:
            return None
        number = round(upto) - seen
        if number < 0:
            return None
        _spread(counts, low_s or bound_s * _FIRST_BEGINS, bound_s, number)
        low_s, seen = bound_s, round(upto)
    return Histogram(counts, sum_s)


def merged(buckets: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """Histograms with the same bounds as one; empty where the bounds differ."""
    if not buckets or any([b for b, _ in rows] != [b for b, _ in buckets[0]] for rows in buckets):
        return []
    return [(rows[0][0], sum(count for _, count in rows)) for rows in zip(*buckets, strict=True)]


def ascending(buckets: Sequence[tuple[float, float]]) -> bool:
    return all(earlier[0] < later[0] for earlier, later in pairwise(buckets))


def _spread(counts: list[int], low_s: float, high_s: float, number: int) -> None:
    if not number:
        return
    if math.isinf(high_s):  # beyond the last bound: just beyond, as nobody knows how far
        counts[min(bisect_right(_MIDDLES_S, low_s), HISTOGRAM_BUCKETS - 1)] += number
        return
    first, end = bisect_right(_MIDDLES_S, low_s), bisect_right(_MIDDLES_S, high_s)
    if end <= first:  # narrower than ours
        counts[max(0, end - 1)] += number
        return
    width = end - first
    for turn, place in enumerate(_turns(width)):
        counts[first + place] += (number + width - 1 - turn) // width


def _turns(width: int) -> list[int]:
    """0 to width - 1 in an order whose every beginning is spread out: by the bits of the number, reversed."""
    bits = max(1, (width - 1).bit_length())
    return sorted(range(width), key=lambda place: int(f"{place:0{bits}b}"[::-1], 2))
