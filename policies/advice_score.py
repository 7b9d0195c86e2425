"""What advice would have been worth: the recorded load on a simulated engine, once as it was and once as advised.

Arrivals are drawn anew from what every tick saw (rate, lengths), so nothing here is measured: every figure is
simulated, and several draws say how far they scatter. There is no host tier. Both runs of a draw get the same requests.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Final

from engine.tunable_state import Patch
from engine.tunables import TunableValue
from envs.arrivals_feed import TraceFeed
from envs.ledger import Ledger, TrueFigures
from envs.profile import Profile
from envs.reward import literature_quality
from envs.signals import Targets
from envs.simulator import SimOptions, Simulator
from envs.workload.trace import Trace, TraceRequest
from policies.load import Lengths

WRITER: Final = "advice"
_MOST_DRAIN_S: Final = 120.0  # after the last tick, for requests that are still in hand


@dataclass(frozen=True)
class Moment:
    """One recorded tick. ``at_s``: since the first one. ``rate_rps``, ``prompt`` and ``output``: what arrived then,
    None where unknown. ``in_force`` and ``advised``: the knobs as they were, and as they would have been.
    """

    at_s: float
    rate_rps: float | None
    prompt: Lengths | None
    output: Lengths | None
    in_force: Mapping[str, TunableValue]
    advised: Mapping[str, TunableValue]


@dataclass(frozen=True)
class Score:
    """One run. ``over_s``: seconds in which a tail was over its target, or work waited without a first token after such
    a second. ``loss_per_token``: mean relative loss of a generated token.
    """

    over_s: float
    preemptions: int
    offered: int
    good: int
    loss_per_token: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def drawn(moments: Sequence[Moment], longest_tokens: int, seed: int) -> Trace:
    """Requests like those that were seen: Poisson at each tick's rate, lengths from its quantiles.

    Raises ValueError when no tick knows of an arrival.
    """
    rng, requests = random.Random(seed), []
    prompt = output = None
    for number, moment in enumerate(moments):
        until_s = moments[number + 1].at_s if number + 1 < len(moments) else moment.at_s + 1.0
        prompt, output = moment.prompt or prompt, moment.output or output
        if not moment.rate_rps or prompt is None:
            continue
        at_s = moment.at_s + rng.expovariate(moment.rate_rps)
        while at_s < until_s:
            tokens = _length(prompt, rng, longest_tokens - 1)
            answer = _length(output or prompt, rng, longest_tokens - tokens)
            requests.append(TraceRequest(at_s, tokens, answer))
            at_s += rng.expovariate(moment.rate_rps)
    if not requests:
        raise ValueError("no arrivals were seen in these ticks")
    return Trace("as recorded", tuple(requests))


def score(moments: Sequence[Moment], trace: Trace, profile: Profile, targets: Targets, *, advised: bool) -> Score:
    """Play ``trace`` with the knobs of every moment, those in force or those advised."""
    wanted = [_simulated(moment.advised if advised else moment.in_force) for moment in moments]
    quality = profile.quality_table() or literature_quality()
    options = SimOptions(
        profile.pool_bytes,
        profile.model.max_model_len,
        values=dict(wanted[0]),
        prefix_cache=False,
        bandwidth_bytes_per_s=profile.device.bandwidth_bytes_per_s,
    )
    simulator = Simulator(
        profile.groups(), profile.latency_model(), options, TraceFeed(trace), ledger=Ledger(targets), quality=quality
    )
    over_s, is_over, good, charge, tokens = 0.0, False, 0, 0.0, 0
    now = dict(wanted[0])
    ends = [*(moment.at_s for moment in moments[1:]), moments[-1].at_s + _MOST_DRAIN_S]
    for begin_s, end_s, values in zip((moment.at_s for moment in moments), ends, wanted, strict=True):
        changes = {knob: value for knob, value in values.items() if now.get(knob) != value}
        for knob, value in changes.items():  # one by one, as the daemon does
            simulator.apply(Patch({knob: value}, WRITER))
        now.update(changes)
        if begin_s == moments[-1].at_s:
            simulator.drain(_MOST_DRAIN_S)
        else:
            simulator.run_until(round(end_s * 1e9))
        figures = simulator.ledger.take()
        is_over = _is_over(figures, targets, waits=is_over and simulator.stats().gauges.waiting > 0)
        over_s += is_over * min(end_s - begin_s, _span(moments))
        good, charge, tokens = good + figures.good, charge + figures.quality_charge, tokens + figures.tokens
    preemptions = simulator.stats().counters.preemptions
    return Score(over_s, preemptions, len(trace.requests), good, charge / tokens if tokens else 0.0)


def _simulated(values: Mapping[str, TunableValue]) -> dict[str, TunableValue]:
    return {knob: value for knob, value in values.items() if knob != "host_offload"}


def _is_over(figures: TrueFigures, targets: Targets, *, waits: bool) -> bool:
    ttft_s, tbt_s = figures.ttft_quantile_s(targets.quantile), figures.tbt_quantile_s(targets.quantile)
    late = (ttft_s is not None and ttft_s > targets.ttft_s) or (tbt_s is not None and tbt_s > targets.tbt_s)
    return late or (waits and ttft_s is None)


def _span(moments: Sequence[Moment]) -> float:
    """Seconds of one tick: the median distance."""
    gaps = sorted(later.at_s - earlier.at_s for earlier, later in pairwise(moments))
    return gaps[len(gaps) // 2] if gaps else 1.0


def _length(lengths: Lengths, rng: random.Random, most: int) -> int:
    return max(1, min(most, round(rng.lognormvariate(lengths.mu, lengths.sigma))))
