"""What measured gaps between tokens say about a profile's step times: one slow factor, bounded. Pure.

A profile that was measured on another day, or estimated, is wrong by about the same factor everywhere. Gaps are made of
steps and of little else, so that their tail tells the factor. It is followed with a time constant much longer than the
windows, and only where the knobs have been still: no burst is taken for a slow engine.
"""

from __future__ import annotations

import math
from typing import Final

from envs.window import number

_MOST: Final = math.log(2.0)  # a profile that is further off is another engine's
_OUTLIER: Final = 1.0  # logarithm of measured over predicted: no single look counts for more


def time_scale(state: object) -> float:
    """The factor on step times, 0.5 to 2, of its logarithm as kept in a state; 1 for anything unusable."""
    return math.exp(_bounded(number(state) or 0.0, _MOST))


def learnt(state: object, measured_s: float | None, predicted_s: float, share: float) -> float:
    """The logarithm of the factor, moved by ``share`` (0 to 1) of what is left to correct.

    ``measured_s``: the tail of gaps, None where unknown. ``predicted_s``: the same with the factor in force.
    """
    now = _bounded(number(state) or 0.0, _MOST)
    if measured_s is None or measured_s <= 0 or predicted_s <= 0:
        return now
    return _bounded(now + share * _bounded(math.log(measured_s / predicted_s), _OUTLIER), _MOST)


def _bounded(value: float, most: float) -> float:
    return min(most, max(-most, value))
