"""Arrival processes by time rescaling: a renewal process of unit rate, stretched by a rate that changes with time.

Bursts on the scale of single gaps come from the coefficient of variation of Gamma gaps (1 is Poisson; BurstGPT and
ServeGen fit Gamma gaps), bursts on the scale of seconds to hours from the envelope.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]


@dataclass(frozen=True)
class Envelope:
    """A rate that is constant between edges: ``rates_rps[i]`` holds from ``edges_s[i]`` to ``edges_s[i + 1]``."""

    edges_s: tuple[float, ...]
    rates_rps: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.edges_s) != len(self.rates_rps) + 1 or any(rate < 0 for rate in self.rates_rps):
            raise ValueError("an envelope needs one more edge than rates, and rates >= 0")
        if any(after <= before for before, after in pairwise(self.edges_s)):
            raise ValueError("edges of an envelope must increase")

    @property
    def duration_s(self) -> float:
        return self.edges_s[-1] - self.edges_s[0]

    @property
    def mean_rps(self) -> float:
        return float(np.dot(np.diff(self.edges_s), self.rates_rps)) / self.duration_s

    @classmethod
    def constant(cls, rate_rps: float, duration_s: float) -> Envelope:
        return cls((0.0, duration_s), (rate_rps,))

    @classmethod
    def phases(cls, *phases: tuple[float, float]) -> Envelope:
        """Phases of (seconds, requests per second), one after the other."""
        edges = np.concatenate(([0.0], np.cumsum([seconds for seconds, _ in phases])))
        return cls(tuple(edges.tolist()), tuple(rate for _, rate in phases))


@dataclass(frozen=True)
class TwoStates:
    """A Markov-modulated rate: low and high, each held for an exponential time of the given mean."""

    low_rps: float
    high_rps: float
    low_mean_s: float
    high_mean_s: float

    @property
    def mean_rps(self) -> float:
        total = self.low_mean_s + self.high_mean_s
        return (self.low_rps * self.low_mean_s + self.high_rps * self.high_mean_s) / total

    def dispersion(self, window_s: float) -> float:
        """Variance over mean of the arrivals in a window of the stationary process (Poisson within a state).

        Fischer and Meier-Hellstern, The Markov-modulated Poisson process (MMPP) cookbook, 1993.
        """
        to_high, to_low = 1.0 / self.low_mean_s, 1.0 / self.high_mean_s
        both = to_high + to_low
        spread = 2.0 * to_high * to_low * (self.high_rps - self.low_rps) ** 2
        limit = spread / (both**2 * (self.low_rps * to_low + self.high_rps * to_high))
        return float(1.0 + limit * (1.0 - (1.0 - np.exp(-both * window_s)) / (both * window_s)))

    def draw(self, duration_s: float, rng: np.random.Generator) -> Envelope:
        """One realisation, started from the stationary distribution."""
        high = bool(rng.random() < self.high_mean_s / (self.low_mean_s + self.high_mean_s))
        edges, rates = [0.0], []
        while edges[-1] < duration_s:
            held = rng.exponential(self.high_mean_s if high else self.low_mean_s)
            edges.append(min(duration_s, edges[-1] + max(held, 1e-6)))
            rates.append(self.high_rps if high else self.low_rps)
            high = not high
        return Envelope(tuple(edges), tuple(rates))


def arrivals(envelope: Envelope, gap_cv: float, rng: np.random.Generator) -> Times:
    """Ascending arrival times in the envelope, in seconds; gaps are Gamma with this coefficient of variation.

    The first gap is drawn like the others, so short windows of very bursty processes start slightly late.
    """
    if gap_cv <= 0:
        raise ValueError(f"a coefficient of variation must be > 0, got {gap_cv}")
    widths, rates = np.diff(envelope.edges_s), np.asarray(envelope.rates_rps)
    passed = np.concatenate(([0.0], np.cumsum(widths * rates)))  # expected arrivals up to each edge
    expected, shape = float(passed[-1]), 1.0 / gap_cv**2
    drawn: list[Times] = []
    reached = 0.0
    while reached < expected:
        batch = int(expected - reached + 4.0 * gap_cv * np.sqrt(expected) + 16)
        unit = reached + np.cumsum(rng.gamma(shape, gap_cv**2, size=batch))
        drawn.append(unit)
        reached = float(unit[-1])
    unit = np.concatenate(drawn) if drawn else np.empty(0)
    unit = unit[unit < expected]
    # Flat stretches (rate 0) would make the inverse ambiguous; the right edge is the one that time has reached.
    index = np.searchsorted(passed, unit, side="right") - 1
    times: Times = np.asarray(envelope.edges_s)[index] + (unit - passed[index]) / rates[index]
    return times
