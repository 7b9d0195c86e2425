"""Token counts (and pauses) drawn from distributions that are fitted to what sources publish: percentiles."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import NormalDist
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

_NORMAL = NormalDist()


class Distribution(Protocol):
    """Whole numbers, each at least 1 unless the bounds say otherwise."""

    @property
    def median(self) -> float: ...

    @property
    def mean(self) -> float: ...

    def draw(self, number: int, rng: np.random.Generator) -> list[int]: ...


@dataclass(frozen=True)
class Lengths:
    """Lognormal with this median and sigma (of the logarithm); what lies outside the bounds is moved to them."""

    median: float
    sigma: float
    least: int = 1
    most: int = 1_000_000

    @classmethod
    def fit(cls, percentiles: Mapping[float, float], least: int = 1, most: int = 1_000_000) -> Lengths:
        """The lognormal nearest to percentiles such as ``{50: 1020, 90: 2734}``, by least squares of logarithms.

        Raises ValueError for fewer than two, or for values that do not rise.
        """
        points = Percentiles(tuple(sorted(percentiles.items())), least, most)
        sigma, centre = np.polyfit(points.scores, points.logs, 1)
        return cls(float(math.exp(centre)), float(sigma), least, most)

    def draw(self, number: int, rng: np.random.Generator) -> list[int]:
        values = np.exp(rng.normal(np.log(self.median), self.sigma, size=number))
        return [int(value) for value in np.clip(np.rint(values), self.least, self.most)]

    @property
    def mean(self) -> float:
        """Before the bounds are applied."""
        return float(self.median * np.exp(self.sigma**2 / 2))


@dataclass(frozen=True)
class Percentiles:
    """Goes through published percentiles exactly: (per cent, tokens) pairs, both rising.

    Between them the logarithm is linear in the normal score, so that two points make a lognormal; beyond the outer
    ones the outer pieces go on. For sources whose tail is no lognormal.
    """

    points: tuple[tuple[float, float], ...]
    least: int = 1
    most: int = 1_000_000

    def __post_init__(self) -> None:
        shares, values = [share for share, _ in self.points], [value for _, value in self.points]
        if len(self.points) < 2 or not all(0 < share < 100 for share in shares) or not all(v > 0 for v in values):
            raise ValueError("at least two percentiles between 0 and 100 are needed, of values > 0")
        if any(b <= a for a, b in pairwise(shares)) or sorted(values) != values:
            raise ValueError("percentiles must rise, and their values must not fall")

    @cached_property
    def scores(self) -> NDArray[np.float64]:
        return np.asarray([_NORMAL.inv_cdf(share / 100.0) for share, _ in self.points])

    @cached_property
    def logs(self) -> NDArray[np.float64]:
        return np.log([value for _, value in self.points])

    @property
    def median(self) -> float:
        return float(np.exp(self._log_at(np.zeros(1)))[0])

    @property
    def mean(self) -> float:
        """By numerical integration, with the bounds applied."""
        scores = np.asarray([_NORMAL.inv_cdf((i + 0.5) / 4096) for i in range(4096)])
        return float(np.clip(np.exp(self._log_at(scores)), self.least, self.most).mean())

    def draw(self, number: int, rng: np.random.Generator) -> list[int]:
        values = np.exp(np.minimum(self._log_at(rng.standard_normal(number)), 100.0))
        return [int(value) for value in np.clip(np.rint(values), self.least, self.most)]

    def _log_at(self, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        piece = np.clip(np.searchsorted(self.scores, scores) - 1, 0, len(self.points) - 2)
        slope = np.diff(self.logs) / np.diff(self.scores)
        result: NDArray[np.float64] = self.logs[piece] + slope[piece] * (scores - self.scores[piece])
        return result
