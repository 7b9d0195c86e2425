"""Cost per million tokens at equal attainment: how far a rate may rise before attainment falls below a level.

A device costs the same per hour whatever it does. With as many replicas as keep attainment at the level, each serves
the rate at which its attainment is just that, so cost per token is inverse to that rate. It is read off a ladder of
rates around the workload's own, the same seeds for all, by linear interpolation of the mean over seeds in the logarithm
of the rate. Where the ladder ends before the level is crossed, the rate is its last rung: a bound, and said to be one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies.evaluation.statistics import Interval, Places, interval

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Ladder:
    """Attainment of a contender on a workload: float64 [seeds, rates]; ``tokens``: prompt and output of a request.

    ``native_rps``: the rate of rung 1.
    """

    rates: tuple[float, ...]
    attainment: Floats
    rps: float
    tokens_per_request: float


def sustained(rates: Sequence[float], attainment: Floats, level: float) -> tuple[float, bool]:
    """The rate (in rungs' units) up to which attainment keeps the level, and whether the ladder's end cut it.

    0 when even the lowest rung does not keep it. Attainment that dips below and comes back counts to the first dip.
    """
    for place, value in enumerate(attainment):
        if value >= level:
            continue
        if place == 0:
            return 0.0, True
        low, high = math.log(rates[place - 1]), math.log(rates[place])
        before = float(attainment[place - 1])
        return math.exp(low + (before - level) / (before - float(value)) * (high - low)), False
    return float(rates[-1]), True


@dataclass(frozen=True)
class Cost:
    """Of a contender on a workload. ``per_million``: None where it never attains the level. ``bounded``: the ladder was
    too short, the true figure lies beyond.
    """

    rate: float
    per_million: float | None
    bounded: bool


def cost(ladder: Ladder, level: float, price_per_hour: float) -> Cost:
    """At ``price_per_hour`` of one device."""
    rate, bounded = sustained(ladder.rates, ladder.attainment.mean(0), level)
    tokens_per_s = rate * ladder.rps * ladder.tokens_per_request
    return Cost(rate, price_per_hour / 3600.0 * 1e6 / tokens_per_s if tokens_per_s else None, bounded)


def reduction(
    policy: Mapping[str, Ladder], native: Mapping[str, Ladder], level: float, draws: Places
) -> tuple[Interval, Mapping[str, Interval]]:
    """How much less a token costs than under native, by workload and on the mean of workloads; draws as in statistics.

    Workloads on which native attains the level at no rung are left out: there is no price to compare with.
    """
    singles, many = dict[str, Interval](), list[Floats]()
    values: list[float] = []
    for place, name in enumerate(native):
        ours, theirs = policy[name], native[name]
        base, _ = sustained(theirs.rates, theirs.attainment.mean(0), level)
        if not base:
            continue
        value = _less(sustained(ours.rates, ours.attainment.mean(0), level)[0], base)
        rows = draws[:, place, :]
        resampled = np.array(
            [
                _less(
                    sustained(ours.rates, ours.attainment[row].mean(0), level)[0],
                    sustained(theirs.rates, theirs.attainment[row].mean(0), level)[0],
                )
                for row in rows
            ]
        )
        values.append(value)
        many.append(resampled)
        singles[name] = interval(value, resampled)
    if not values:
        return Interval(math.nan, math.nan, math.nan), singles
    return interval(float(np.mean(values)), np.mean(many, axis=0)), singles


def _less(rate: float, base: float) -> float:
    return 1.0 - base / rate if rate else -math.inf
