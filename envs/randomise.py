"""Domain randomisation: what differs from episode to episode, drawn from one seeded generator."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from envs.latency_model import LatencyModel
from envs.simulated_runner import Jitter
from envs.workload.arrivals import TwoStates
from envs.workload.generators import Workload
from envs.workload.lengths import Distribution

Range = tuple[float, float]


@dataclass(frozen=True)
class Randomisation:
    """Ranges to draw from: factors and shares log-uniformly, delays in seconds uniformly. (1, 1) and (0, 0) switch one
    off; so does leaving it out.

    ``service`` scales all step times, ``terms`` each term of the latency model besides. ``lengths`` scales prompts and
    outputs (each its own factor), ``rate`` arrivals, ``bursts`` the variation of gaps, ``pool`` the KV pool.
    ``jitter``: relative deviation of single steps.
    """

    service: Range = (1.0, 1.0)
    terms: Range = (1.0, 1.0)
    lengths: Range = (1.0, 1.0)
    rate: Range = (1.0, 1.0)
    bursts: Range = (1.0, 1.0)
    pool: Range = (1.0, 1.0)
    actuation_delay_s: Range = (0.0, 0.0)
    metric_lag_s: Range = (0.0, 0.0)
    jitter: Range = (0.0, 0.0)

    def __post_init__(self) -> None:
        for name in ("service", "terms", "lengths", "rate", "bursts", "pool"):
            low, high = getattr(self, name)
            if not 0 < low <= high:
                raise ValueError(f"{name}: a range of factors needs 0 < low <= high, got {low} and {high}")
        for name in ("actuation_delay_s", "metric_lag_s", "jitter"):
            low, high = getattr(self, name)
            if not 0 <= low <= high:
                raise ValueError(f"{name}: a range needs 0 <= low <= high, got {low} and {high}")

    @classmethod
    def usual(cls) -> Randomisation:
        """Wide enough to cover what a profile gets wrong and what traffic does next month."""
        return cls(
            service=(0.7, 1.4),
            terms=(0.8, 1.25),
            lengths=(0.7, 1.4),
            rate=(0.5, 2.0),
            bursts=(0.7, 2.0),
            pool=(0.6, 1.5),
            actuation_delay_s=(0.0, 0.5),
            metric_lag_s=(0.0, 1.0),
            jitter=(0.0, 0.1),
        )

    def draw(self, rng: np.random.Generator) -> Draw:
        """One episode's world. The generator moves on by the same amount whatever the ranges."""
        service, prompts, outputs, rate, bursts, pool = (
            _factor(rng, one) for one in (self.service, self.lengths, self.lengths, self.rate, self.bursts, self.pool)
        )
        delay, lag, jitter = (rng.uniform(*one) for one in (self.actuation_delay_s, self.metric_lag_s, self.jitter))
        seeds = [int(seed) for seed in rng.integers(2**31, size=3)]
        return Draw(
            service, prompts, outputs, rate, bursts, pool, delay, lag, Jitter(jitter, seeds[0]), self.terms, *seeds[1:]
        )


@dataclass(frozen=True)
class Draw:
    """What was drawn; see :class:`Randomisation`. ``workload_seed`` makes the arrivals."""

    service: float
    prompts: float
    outputs: float
    rate: float
    bursts: float
    pool: float
    actuation_delay_s: float
    metric_lag_s: float
    jitter: Jitter
    terms: Range
    terms_seed: int
    workload_seed: int

    def model(self, model: LatencyModel) -> LatencyModel:
        """The latency model of this world."""
        rng = np.random.default_rng(self.terms_seed)
        seconds = {name: value * self.service * _factor(rng, self.terms) for name, value in model.seconds.items()}
        return LatencyModel(seconds, model.knee_tokens)

    def workload(self, workload: Workload) -> Workload:
        """The workload of this world; its rate apart, which the generator takes."""
        return replace(
            workload,
            prompt=Scaled(workload.prompt, self.prompts),
            output=Scaled(workload.output, self.outputs),
            gap_cv=workload.gap_cv * self.bursts,
            rate=self._swings(workload.rate) if isinstance(workload.rate, TwoStates) else workload.rate,
            then=tuple(self.workload(regime) for regime in workload.then),
        )

    def _swings(self, rate: TwoStates) -> TwoStates:
        """Both states further from the mean by the burst factor, none below zero, the mean kept."""
        mean = rate.mean_rps
        most = mean / max(mean - rate.low_rps, 1e-9)
        by = min(self.bursts, most)
        return replace(rate, low_rps=mean + by * (rate.low_rps - mean), high_rps=mean + by * (rate.high_rps - mean))


def _factor(rng: np.random.Generator, limits: Range) -> float:
    return float(np.exp(rng.uniform(np.log(limits[0]), np.log(limits[1]))))


@dataclass(frozen=True)
class Scaled:
    """A distribution of lengths whose every draw is ``factor`` times as long, and at least 1."""

    lengths: Distribution
    factor: float

    @property
    def median(self) -> float:
        return self.lengths.median * self.factor

    @property
    def mean(self) -> float:
        return self.lengths.mean * self.factor

    def draw(self, number: int, rng: np.random.Generator) -> list[int]:
        drawn = self.lengths.draw(number, rng)
        return drawn if self.factor == 1.0 else [max(1, round(length * self.factor)) for length in drawn]
