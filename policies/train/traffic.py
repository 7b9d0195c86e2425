"""What is played when: every episode is a pure function of seed, stream and number, whatever the policy does.

So two policies, two seeds of one network, a resumed run and its uninterrupted twin all meet the same traffic. Episodes
for held-out scores come from other seeds, and of a trace from its last part; runs of all seeds share them.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from engine.tunables import TUNABLES, TunableValue
from envs.fidelity import capacity_rps
from envs.profile import Profile
from envs.randomise import Scaled
from envs.signals import Targets
from envs.simulator import SimOptions
from envs.workload.catalogue import CATALOGUE
from envs.workload.generators import Workload, generate
from envs.workload.loaders import load_trace
from envs.workload.scaling import Scaling, scale
from envs.workload.splits import split_by_time, window
from envs.workload.trace import Trace, TraceError
from policies.evaluation.calibration import unloaded_targets
from policies.train.rates import peak_rps
from policies.train.recipe import Recipe, Source

TRAINING_SHARE = 0.7  # of a trace's duration; the rest is for held-out scores
RESOLVED_BY = ("sources", "profile", "pool_bytes", "length_scale", "ttft_target_s", "tbt_target_s")
"""Of a recipe: all that rates and targets depend on."""
_PROBE_S = 30.0  # of a source at a rate, at least, and at least _PROBE requests
MAX_OFFSET_S = 1800.0  # where in a generated workload an episode may begin
RANDOM_START = 0.3  # share of training episodes that begin with a knob or two anywhere
_HELD_OUT = 7919  # leads the seeds of held-out episodes; no run's own seeds have three numbers after it
_PROBE = 100  # requests that measure what a profile sustains
_TRIES = 8


@dataclass(frozen=True)
class Episode:
    """``rate_scale`` for the environment (a generated trace has it in already); ``mean_rps`` and generated tokens per
    second of the source as scaled.
    """

    source: str
    trace: Trace
    rate_scale: float
    mean_rps: float
    mean_tps: float
    targets: Targets
    values: dict[str, TunableValue]
    world_seed: int


@dataclass(frozen=True)
class _Loaded:
    """A source ready to be cut: ``parts`` for training and for held-out scores, None where it is generated (then
    ``length_scale`` is still to be applied).
    """

    name: str
    rate_scale: float
    mean_rps: float
    targets: Targets
    length_scale: float
    workload: Workload | None = None
    parts: tuple[Trace, Trace] | None = None


class Traffic:
    """All episodes of a recipe with resolved sources. Picklable; reads trace files when made.

    Raises TraceError, ValueError for sources that cannot be used.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._seed, self._episode_s = recipe.seed, recipe.episode_s + recipe.warm_up_s
        self._spread = recipe.randomisation()
        self._knobs = tuple(recipe.knobs)
        self._sources = [_load(source, recipe) for source in recipe.sources]

    def training(self, stream: int, number: int) -> Episode:
        """Episode ``number`` of ``stream``."""
        rng = np.random.default_rng([self._seed, 0, stream, number])
        source = self._sources[int(rng.integers(len(self._sources)))]
        values = self._values(rng) if rng.random() < RANDOM_START else {}
        return self._cut(source, rng, values, part=0)

    def held_out(self, number: int) -> Episode:
        """Held-out episode ``number``: sources take turns, knobs begin at their defaults."""
        rng = np.random.default_rng([_HELD_OUT, number])
        return self._cut(self._sources[number % len(self._sources)], rng, {}, part=1)

    def _values(self, rng: np.random.Generator) -> dict[str, TunableValue]:
        chosen = rng.permutation(len(self._knobs))[: int(rng.integers(1, 3))]
        knobs = [self._knobs[index] for index in sorted(chosen)]
        return {knob: TUNABLES[knob].values[int(rng.integers(len(TUNABLES[knob].values)))] for knob in knobs}

    def _cut(self, source: _Loaded, rng: np.random.Generator, values: dict[str, TunableValue], *, part: int) -> Episode:
        world_seed, traffic_seed = (int(seed) for seed in rng.integers(2**31, size=2))
        fastest = self._spread.rate[1]  # the world may play it this much faster
        bursts = float(np.exp(rng.uniform(*np.log(self._spread.bursts))))
        if source.parts is not None:
            span_s = self._episode_s * fastest * source.rate_scale
            trace = _window(source.parts[part], span_s, rng, source.parts[part].duration_s)
            return _episode(source, trace, source.rate_scale, values, world_seed)
        assert source.workload is not None  # noqa: S101  # a source is one or the other
        span_s = self._episode_s * fastest
        workload = replace(source.workload, gap_cv=source.workload.gap_cv * bursts)
        whole = generate(workload, duration_s=MAX_OFFSET_S + span_s, seed=traffic_seed, rate_scale=source.rate_scale)
        trace = _window(_shorter(whole, source.length_scale), span_s, rng, MAX_OFFSET_S + span_s)
        return _episode(source, trace, 1.0, values, world_seed)


def resolve(recipe: Recipe, profile: Profile) -> list[Source]:
    """The recipe's sources with rates and targets that fit this profile, and traces with their digests.

    Targets that are left open become 5 times the TTFT and 2.5 times the gap between tokens of requests that are alone.
    Where no ``rate_scale`` is given it becomes the one at which static native serves most inside them
    (:mod:`policies.train.rates`). Raises TraceError, ValueError.
    """
    return [_resolved(source, recipe, profile) for source in recipe.sources]


def digest(trace: Trace) -> str:
    """SHA-256 of a trace's requests."""
    sha = hashlib.sha256()
    for request in trace.requests:
        sha.update(repr((request.arrival_s, request.prompt_tokens, request.output_tokens, request.hash_ids)).encode())
    return sha.hexdigest()


def _resolved(source: Source, recipe: Recipe, profile: Profile) -> Source:
    given: dict[str, float | str | None] = {}
    if source.trace is not None:
        trace = load_trace(Path(source.trace))
        if not trace.duration_s:
            raise TraceError(f"{source.trace}: all requests arrive at one time, so it has no rate to train at")
        given["sha256"] = found = digest(trace)
        if source.sha256 not in {None, found}:
            raise ValueError(f"{source.trace} is not the trace that this run began with")
        mean_rps, at_rate = _mean_rps(trace), partial(_squeezed, _shorter(trace, recipe.length_scale))
    else:
        workload = _workload(source)
        mean_rps, at_rate = workload.mean_rps, partial(_generated, workload, recipe.length_scale)
    probe = at_rate(mean_rps)
    options = SimOptions(
        recipe.pool_bytes or profile.pool_bytes, profile.model.max_model_len, prefix_cache=probe.block_tokens > 0
    )
    alone = unloaded_targets(profile, probe, replace(options, prefix_cache=False))
    given["ttft_target_s"] = ttft_s = source.ttft_target_s or recipe.ttft_target_s or round(alone.ttft_s, 6)
    given["tbt_target_s"] = tbt_s = source.tbt_target_s or recipe.tbt_target_s or round(alone.tbt_s, 6)
    if source.rate_scale is None:
        most_rps = capacity_rps(profile.groups(), profile.latency_model(), probe, options)
        peak = peak_rps(profile, at_rate, options, Targets(ttft_s, tbt_s), most_rps)
        given["rate_scale"] = float(f"{peak / mean_rps:.6g}")
    return source.model_copy(update=given)


def _generated(workload: Workload, length_scale: float, rate_rps: float) -> Trace:
    """Of a workload at a mean rate; of traffic in storms enough requests take longer to come than that says."""
    duration_s = max(_PROBE_S, 2 * _PROBE / rate_rps)
    for _ in range(_TRIES):
        try:
            trace = generate(workload, duration_s=duration_s, seed=0, rate_scale=rate_rps / workload.mean_rps)
        except TraceError:  # a silence
            trace = None
        if trace is not None and len(trace.requests) >= _PROBE:
            return _shorter(trace, length_scale)
        duration_s *= 2
    raise TraceError(f"{workload.name}: hardly anything arrives in {duration_s:.0f} s")


def _squeezed(trace: Trace, rate_rps: float) -> Trace:
    """The beginning of a trace at a mean rate."""
    number = max(_PROBE, math.ceil(rate_rps * _PROBE_S))
    return scale(trace, Scaling(time_scale=_mean_rps(trace) / rate_rps, max_requests=number))


def _load(source: Source, recipe: Recipe) -> _Loaded:
    rate_scale, length_scale, targets = source.rate_scale or 1.0, recipe.length_scale, recipe.targets_of(source)
    if source.trace is None:
        workload = _workload(source)
        rps = workload.mean_rps * rate_scale
        return _Loaded(source.name, rate_scale, rps, targets, length_scale, workload)
    trace = _shorter(load_trace(Path(source.trace)), length_scale)
    parts = split_by_time(trace, (TRAINING_SHARE, 1 - TRAINING_SHARE))
    rps = _mean_rps(trace) * rate_scale
    return _Loaded(source.name, rate_scale, rps, targets, 1.0, None, (parts[0], parts[1]))


def _shorter(trace: Trace, length_scale: float) -> Trace:
    return trace if length_scale == 1.0 else scale(trace, Scaling(length_scale=length_scale))


def _episode(
    source: _Loaded, trace: Trace, rate_scale: float, values: dict[str, TunableValue], world_seed: int
) -> Episode:
    outputs = sum(request.output_tokens for request in trace.requests) / len(trace.requests)
    return Episode(
        source.name, trace, rate_scale, source.mean_rps, source.mean_rps * outputs, source.targets, values, world_seed
    )


def _mean_rps(trace: Trace) -> float:
    return len(trace.requests) / max(trace.duration_s, 1e-9)


def _workload(source: Source) -> Workload:
    found = CATALOGUE.get(source.workload or "")
    if found is None:
        raise ValueError(f"workload {source.workload!r} is not known; choose one of {', '.join(CATALOGUE)}")
    return _stretched(found, source.prompt_scale, source.output_scale)


def _stretched(workload: Workload, prompts: float, outputs: float) -> Workload:
    if (prompts, outputs) == (1.0, 1.0):
        return workload
    return replace(
        workload,
        prompt=Scaled(workload.prompt, prompts),
        output=Scaled(workload.output, outputs),
        then=tuple(_stretched(regime, prompts, outputs) for regime in workload.then),
    )


def _window(trace: Trace, span_s: float, rng: np.random.Generator, duration_s: float) -> Trace:
    """A stretch of a trace from anywhere in it; the whole of one that is shorter."""
    for _ in range(_TRIES):
        start_s = rng.uniform(0.0, max(0.0, duration_s - span_s))
        try:
            return window(trace, start_s, start_s + span_s)
        except TraceError:  # a silence
            continue
    return trace
