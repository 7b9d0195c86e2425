"""Interquartile means with intervals from a stratified bootstrap. numpy only.

After Agarwal et al., Deep Reinforcement Learning at the Edge of the Statistical Precipice, 2021: runs are resampled
within each workload (the stratum), and the interquartile mean over all of them is taken. Contenders met the same
requests, so one draw of seeds serves all of them: differences are paired.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Places = NDArray[np.int64]


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95 % interval; nan where it cannot be told."""

    value: float
    low: float
    high: float

    def to_json(self) -> dict[str, float | None]:
        return {name: value if math.isfinite(value) else None for name, value in vars(self).items()}

    def __str__(self) -> str:
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"

    def times(self, factor: float) -> Interval:
        return Interval(self.value * factor, self.low * factor, self.high * factor)


def interval(value: float, draws: Floats) -> Interval:
    """``draws``: the estimate of every resample, those that are no number left out."""
    known = draws[np.isfinite(draws)]
    if not math.isfinite(value) or not known.size:
        return Interval(float(value), math.nan, math.nan)
    low, high = np.quantile(known, (0.025, 0.975))
    return Interval(float(value), float(low), float(high))


def iqm(values: Floats) -> Any:
    """Mean of the middle half along the last axis; of fewer than four values all of them."""
    cut = values.shape[-1] // 4
    ordered = np.sort(values, axis=-1)
    return ordered[..., cut : values.shape[-1] - cut].mean(axis=-1)


def seed_draws(workloads: int, seeds: int, number: int, seed: int = 0) -> Places:
    """Places of seeds, drawn with replacement within each workload: int64 [number, workloads, seeds]."""
    return np.random.default_rng(seed).integers(seeds, size=(number, workloads, seeds))


def resampled(scores: Floats, draws: Places) -> Floats:
    """Scores [workloads, seeds] by every draw: [number, workloads, seeds]."""
    return np.take_along_axis(np.broadcast_to(scores, draws.shape), draws, axis=2)


def iqm_interval(scores: Floats, draws: Places) -> Interval:
    """The IQM over workloads and seeds of [workloads, seeds]."""
    return interval(iqm(scores.ravel()), iqm(_flat(resampled(scores, draws))))


def iqm_ratio(scores: Floats, base: Floats, draws: Places) -> Interval:
    """The ratio of two IQMs; nan where the base's is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        value = np.float64(iqm(scores.ravel())) / np.float64(iqm(base.ravel()))
        many = iqm(_flat(resampled(scores, draws))) / iqm(_flat(resampled(base, draws)))
    return interval(float(value), many)


def iqm_difference(scores: Floats, base: Floats, draws: Places) -> Interval:
    """The IQM of paired differences."""
    return iqm_interval(scores - base, draws)


def improvement(scores: Floats, base: Floats, draws: Places) -> Interval:
    """Probability of improvement: the share of cells with a better score on the same requests, ties half."""
    wins = (scores > base) + 0.5 * (scores == base)
    return interval(float(wins.mean()), resampled(wins, draws).mean(axis=(1, 2)))


def _flat(values: Floats) -> Floats:
    return values.reshape(values.shape[0], -1)
