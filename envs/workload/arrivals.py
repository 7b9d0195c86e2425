"""Arrival processes by time rescaling: a renewal process of unit rate, stretched by a rate that changes with time.

Bursts on the scale of single gaps come from the coefficient of variation of Gamma gaps (1 is Poisson; BurstGPT and
ServeGen fit Gamma gaps), bursts on the scale of seconds to hours from the envelope.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, groupby, pairwise

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]
_BATCH = 8192  # arrivals drawn at once: what a stream of any length holds in memory

MOST_RPS = 1e6  # beyond any service: a damaged number, or a run without an end


@dataclass(frozen=True)
class Envelope:
    """A rate that is constant between edges: ``rates_rps[i]`` holds from ``edges_s[i]`` to ``edges_s[i + 1]``.

    ``gap_cvs``: the coefficient of variation of gaps in each piece, where a source gives it; else the workload's holds.
    """

    edges_s: tuple[float, ...]
    rates_rps: tuple[float, ...]
    gap_cvs: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, (*self.edges_s, *self.rates_rps))):
            raise ValueError("edges and rates of an envelope must be finite")
        if len(self.edges_s) != len(self.rates_rps) + 1 or any(rate < 0 for rate in self.rates_rps):
            raise ValueError("an envelope needs one more edge than rates, and rates >= 0")
        if any(after <= before for before, after in pairwise(self.edges_s)):
            raise ValueError("edges of an envelope must increase")
        if self.gap_cvs is not None and (
            len(self.gap_cvs) != len(self.rates_rps) or not all(0 < cv < math.inf for cv in self.gap_cvs)
        ):
            raise ValueError("an envelope needs one coefficient of variation > 0 per rate, or none at all")

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

    @classmethod
    def flash_crowd(
        cls,
        base_rps: float,
        peak_rps: float,
        *,
        calm_s: float,
        rise_s: float,
        hold_s: float,
        decay_s: float,
        steps: int = 12,
    ) -> Envelope:
        """Calm, a straight rise to the peak, the peak, and an exponential decay (time constant ``decay_s``) to the calm
        rate, cut after four time constants. Rise and decay are made of ``steps`` constant pieces each.

        The three phases are those of Ari et al., Managing flash crowds on the Internet, 2003.
        """
        rise = [(rise_s / steps, base_rps + (peak_rps - base_rps) * (i + 0.5) / steps) for i in range(steps)]
        piece = 4.0 / steps  # in time constants; the mean over a piece keeps the number of arrivals
        mean = (1.0 - math.exp(-piece)) / piece
        fall = [(piece * decay_s, base_rps + (peak_rps - base_rps) * math.exp(-piece * i) * mean) for i in range(steps)]
        return cls.phases((calm_s, base_rps), *rise, (hold_s, peak_rps), *fall)

    def scaled(self, factor: float) -> Envelope:
        """The same shape with every rate multiplied."""
        return replace(self, rates_rps=tuple(rate * factor for rate in self.rates_rps))

    def covering(self, duration_s: float) -> Envelope:
        """The envelope moved to 0 s, repeated and cut to the duration."""
        edges, rates, cvs = [0.0], [], []
        for turn in count():
            start = turn * self.duration_s - self.edges_s[0]
            for piece, edge in enumerate(self.edges_s[1:]):
                edges.append(min(duration_s, start + edge))
                rates.append(self.rates_rps[piece])
                cvs.append(self.gap_cvs[piece] if self.gap_cvs else 0.0)
                if edges[-1] >= duration_s:
                    return Envelope(tuple(edges), tuple(rates), tuple(cvs) if self.gap_cvs else None)
        raise AssertionError("unreachable: the envelope repeats until the duration is covered")


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
    """Ascending arrival times in the envelope, in seconds; gaps are Gamma with this coefficient of variation, or with
    the envelope's own.
    """
    batches = list(arrival_batches(envelope, gap_cv, rng))
    return np.concatenate(batches) if batches else np.empty(0)


def arrival_batches(envelope: Envelope, gap_cv: float, rng: np.random.Generator) -> Iterator[Times]:
    """The times of :func:`arrivals`, a bounded number at a time."""
    cvs = envelope.gap_cvs or (gap_cv,) * len(envelope.rates_rps)
    if min(cvs) <= 0:
        raise ValueError(f"a coefficient of variation must be > 0, got {min(cvs)}")
    start = 0
    for cv, group in groupby(cvs):
        stop = start + len(list(group))
        edges, rates = np.asarray(envelope.edges_s[start : stop + 1]), np.asarray(envelope.rates_rps[start:stop])
        passed = np.concatenate(([0.0], np.cumsum(np.diff(edges) * rates)))  # expected arrivals up to each edge
        for unit in _unit_times(float(passed[-1]), cv, rng):
            # Flat stretches (rate 0) would make the inverse ambiguous; the right edge is the one that time has reached.
            index = np.searchsorted(passed, unit, side="right") - 1
            times: Times = edges[index] + (unit - passed[index]) / rates[index]
            yield times
        start = stop


def _unit_times(expected: float, gap_cv: float, rng: np.random.Generator) -> Iterator[Times]:
    """Arrivals of rate 1 in [0, expected), stationary from the start: the first gap is the rest of one that had begun.

    Were it drawn like the others, a process of CV 13 would bring (CV² - 1) / 2 = 84 arrivals too many at its start
    (Cox, Renewal Theory, 1962: the rest of a gap is a uniform share of a length-biased one, here Gamma of shape + 1).
    """
    shape, scale = 1.0 / gap_cv**2, gap_cv**2
    reached = float(rng.random() * rng.gamma(shape + 1.0, scale))
    first = np.asarray([reached])
    while reached < expected:
        size = min(_BATCH, int(expected - reached + 4.0 * gap_cv * math.sqrt(expected) + 16))
        unit = np.cumsum(np.concatenate((first, rng.gamma(shape, scale, size=size))))
        reached, first = float(unit[-1]), unit[-1:]
        unit = unit[:-1]  # the last one begins the next batch
        yield unit[unit < expected]
