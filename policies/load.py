"""What is asked of an engine: rates, lengths and what is in hand, read from an observation; and a short forecast."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Final

from envs.spaces import Observation
from envs.window import number

_ROOT_HALF: Final = math.sqrt(0.5)
_LONGEST, _MOST = 1e6, 1e5  # tokens of a request, requests: the bounds of the features
_P95: Final = 1.6449  # standard normal
_WIDEST: Final = 1.8  # of the logarithm of a length: beyond, two quantiles say little about the mean
_LONGEST_TREND_S: Final = 10.0
_USUAL_SIGMA: Final = 0.8  # of outputs, until some have ended: the published sources have 0.7 to 1.4
_MOST_MISSED: Final = 3.0
_KEEPS_UP: Final = 0.9  # of arrivals: whoever completes so many keeps up, as far as counting can tell
_LEAST_SERVED_RPS: Final = 0.01


@dataclass(frozen=True)
class Lengths:
    """Lognormal lengths in tokens: ``mu`` and ``sigma`` of the logarithm."""

    mu: float
    sigma: float
    mean: float = field(init=False, compare=False)
    second: float = field(init=False, compare=False)  # mean of the square

    def __post_init__(self) -> None:
        object.__setattr__(self, "mean", math.exp(self.mu + self.sigma**2 / 2))
        object.__setattr__(self, "second", self.mean**2 * math.exp(self.sigma**2))

    @classmethod
    def of(cls, median: float | None, p95: float | None) -> Lengths | None:
        """From two quantiles, None while the median is unknown."""
        if median is None or median <= 0:
            return None
        median = min(_LONGEST, max(1.0, median))
        wide = min(_LONGEST, max(median, p95 or median))
        return cls(math.log(median), min(_WIDEST, math.log(wide / median) / _P95))

    @classmethod
    def of_moments(cls, mean: float, second: float) -> Lengths:
        """With this mean and mean square."""
        variance = math.log(max(1.0, second / (mean * mean)))
        return cls(math.log(mean) - variance / 2, math.sqrt(variance))

    @property
    def p95(self) -> float:
        return math.exp(self.mu + _P95 * self.sigma)

    def cut_at(self, limit: float) -> tuple[float, float]:
        """Mean of min(length, limit), and mean of the share of a length that lies beyond the limit."""
        sigma = self.sigma
        z = (math.log(limit) - self.mu) / (sigma or 1e-9)
        longer = 1 - _normal(z)
        inverse = math.exp(-self.mu + sigma * sigma / 2) * (1 - _normal(z + sigma))
        return self.mean * _normal(z - sigma) + limit * longer, max(0.0, longer - limit * inverse)


@dataclass(frozen=True)
class Load:
    """``rate_rps``: arrivals. ``hit_rate``: share of prompt tokens that need not be computed. ``running``, ``waiting``:
    requests now, ``held_tokens``: KV of those that run. ``lossy_share``: of that KV, quantised already. ``served_rps``:
    completions, None while unknown.
    """

    rate_rps: float
    prompt: Lengths
    output: Lengths
    hit_rate: float = 0.0
    running: float = 0.0
    waiting: float = 0.0
    held_tokens: float = 0.0
    lossy_share: float = 0.0
    served_rps: float | None = None

    def at(self, rate_rps: float) -> Load:
        return replace(self, rate_rps=rate_rps)

    def falls_behind(self, patience_s: float) -> bool:
        """Whether less is served than arrives, and what waits would take longer than ``patience_s`` to begin."""
        served_rps = self.served_rps
        return (
            served_rps is not None
            and served_rps < _KEEPS_UP * self.rate_rps
            and (self.waiting > patience_s * served_rps)
        )


def load_of(observation: Observation) -> Load | None:
    """The load that the windows show, at the long window's rate; None while rate or lengths are unknown.

    Of outputs the windows see those that have ended, so long ones are missed where requests last as long as a window.
    Tokens generated per arrival do not miss them, nor per request that ended where not all that arrive are let in: the
    larger of the two estimates counts.
    """
    values = {name: number(observation.values.get(name)) for name in _READ}
    rate = values["offered_rps_long"]
    if rate is None:
        rate = values["offered_rps"]
    prompt = Lengths.of(values["prompt_tokens_p50"], values["prompt_tokens_p95"])
    ended = Lengths.of(values["output_tokens_p50"], values["output_tokens_p95"])
    if rate is None or rate < 0 or prompt is None:
        return None
    served = values["completed_rps"]
    through = max(rate, values["offered_rps"] or 0.0)
    # A second's worth waits: more arrive than run. Before any has ended nothing tells how many tokens one takes.
    if served is not None and (served > 0 or ended is not None) and (values["waiting"] or 0.0) > served:
        through = min(through, max(served, _LEAST_SERVED_RPS))
    output = _output(ended, values["decode_tps"], through)
    if output is None:
        return None
    running = min(_MOST, max(0.0, values["running"] or 0.0))
    native = values["bytes_share_native"]
    return Load(
        rate_rps=min(rate, _MOST_RPS),
        prompt=prompt,
        output=output,
        hit_rate=min(0.99, max(0.0, values["hit_rate"] or 0.0)),
        running=running,
        waiting=min(_MOST, max(0.0, values["waiting"] or 0.0)),
        held_tokens=running * min(_LONGEST, max(0.0, values["tokens_per_sequence"] or 0.0)),
        lossy_share=0.0 if native is None else min(1.0, max(0.0, 1 - native)),
        served_rps=None if served is None else max(0.0, served),
    )


def forecast_rps(observation: Observation, *, short_s: float = 10.0, long_s: float = 60.0, noise: float = 1.0) -> float:
    """Arrivals per second to expect in the next short window; 0 while unknown.

    The long window's rate, moved towards the short one's as far as counting does not explain the difference (``noise``
    standard deviations of a Poisson count). A rise is carried on along its trend, for a short window at most.
    """
    short, long = (number(observation.values.get(name)) for name in ("offered_rps", "offered_rps_long"))
    if short is None or long is None:
        return max(0.0, min(_MOST_RPS, max(short or 0.0, long or 0.0)))
    scatter = noise * math.sqrt(max(long, 1 / short_s) / short_s)
    excess = max(0.0, short - long - scatter)
    deficit = max(0.0, long - short - scatter)
    # The windows' middles lie this far apart, and the next window's middle a short window beyond.
    slope = excess / ((long_s - short_s) / 2)
    return max(0.0, min(_MOST_RPS, long + excess - deficit + slope * min(short_s, _LONGEST_TREND_S)))


def _output(ended: Lengths | None, decode_tps: float | None, rate_rps: float) -> Lengths | None:
    """Output lengths from those that have ended and from tokens generated per arrival."""
    per_arrival = min(_LONGEST, (decode_tps or 0.0) / rate_rps) if rate_rps > 1e-6 else 0.0
    if ended is None:
        return Lengths(math.log(per_arrival) - _USUAL_SIGMA**2 / 2, _USUAL_SIGMA) if per_arrival >= 1 else None
    missed = min(_MOST_MISSED, per_arrival / ended.mean)
    return Lengths(ended.mu + math.log(max(1.0, missed)), ended.sigma)


def _normal(z: float) -> float:
    return 0.5 * math.erfc(-z * _ROOT_HALF)


_MOST_RPS: Final = 1e4
_READ: Final = (
    "offered_rps", "offered_rps_long", "prompt_tokens_p50", "prompt_tokens_p95", "output_tokens_p50",
    "output_tokens_p95", "completed_rps", "decode_tps", "hit_rate", "running", "waiting", "tokens_per_sequence",
    "bytes_share_native",
)  # fmt: skip
