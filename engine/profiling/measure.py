"""Runs scenarios on a loaded model and reports, step by step, what was in it and how long it took. Imports torch."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from engine.cache_manager import CacheManager
from engine.clock import Clock, RealClock
from engine.core import EngineCore
from engine.core_options import CoreOptions
from engine.core_stats import CoreStats
from engine.events import NullSink
from engine.formats import NATIVE
from engine.loader import LoadedModel
from engine.memory_model import pool_capacity
from engine.model_runner import ModelRunner
from engine.plan import RecodeBatch, SequenceOutput, StepPlan
from engine.profiling.scenarios import Scenario
from engine.request import Request, SamplingParams
from engine.runner import StepWork
from engine.scheduler import Scheduler
from engine.stats import Counters
from engine.step_counts import STEP_INDEX, StepCounter
from engine.tunable_state import Patch
from engine.tunables import default_values
from engine.warmup import warm_up
from kernels import ops

_KIND = tuple(STEP_INDEX[name] for name in ("prefill_token", "decode_sequence", "regrouped", "after_chunk"))
_DECODE_STEPS = 9
_SWITCH_STEPS = 4
_SHORTEST = 8  # tokens of a prompt in a served load
_ODD = 3
REPEATS = 3  # rounds over all scenarios
_LARGE_TOKENS = 4096
_DECODED = 64  # tokens that a scenario adds to a sequence, about
_PARTS_OF_OLD = 4  # blocks of an old request


@dataclass
class Samples:
    """Counts (in the order of :mod:`engine.step_counts`) and mean seconds, one row per kind of step or conversion;
    ``step_repeats``: how many steps each row is the mean of.
    """

    step_counts: list[list[int]] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    step_repeats: list[int] = field(default_factory=list)
    recode_counts: list[list[int]] = field(default_factory=list)
    recode_s: list[float] = field(default_factory=list)


@dataclass
class TimedStep:
    """One step: its counts and time without recoding, and the recoding's."""

    counts: list[int]
    step_ns: int = 0
    recode_counts: list[int] | None = None
    recode_ns: int = 0


Round = dict[Scenario, list[TimedStep]]
"""What one round over some scenarios took."""


class _TimedRunner:
    """Passes everything on to a runner and counts it. Times are the core's own: recoding is planned and swapped by the
    scheduler, which counts that in.
    """

    def __init__(self, runner: ModelRunner, counter: StepCounter, clock: Clock, counters: Counters) -> None:
        self.steps: list[TimedStep] = []
        self._runner = runner
        self._counter = counter
        self._clock = clock
        self._counters = counters
        self._recode_counts: list[int] | None = None

    def step(self, core: EngineCore) -> None:
        """One timed step of the core that has this runner."""
        before, begin_ns, recoded_ns = len(self.steps), self._clock.now_ns(), self._counters.recode_time_ns
        core.step()
        if len(self.steps) > before:
            last = self.steps[-1]
            last.recode_ns = self._counters.recode_time_ns - recoded_ns
            last.step_ns = self._clock.now_ns() - begin_ns - last.recode_ns

    @property
    def last_work(self) -> StepWork:
        return self._runner.last_work

    def recode(self, batches: Sequence[RecodeBatch]) -> None:
        self._recode_counts = self._counter.recode(batches)
        self._runner.recode(batches)

    def execute(self, plan: StepPlan, cache: CacheManager) -> list[SequenceOutput]:
        self.steps.append(TimedStep(self._counter.step(plan.sequences, cache), recode_counts=self._recode_counts))
        self._recode_counts = None
        return self._runner.execute(plan, cache)


class Measurer:
    """Measures one loaded model over a KV pool of ``pool_bytes``. Raises RuntimeError or torch's out-of-memory error
    when the pool does not fit the device, ValueError when it is too small.
    """

    def __init__(self, loaded: LoadedModel, pool_bytes: int, *, clock: Clock | None = None, seed: int = 0) -> None:
        self._loaded = loaded
        self._pool_bytes = pool_bytes
        self._clock = clock or RealClock()
        self._random = random.Random(seed)
        layout = CacheManager(
            loaded.groups, pool_bytes, default_values(), recent_tokens=0, sinks=0, watermark=0.0, clock=self._clock,
            events=NullSink(),
        ).layout  # fmt: skip
        sizes = [layout.arena_bytes(group) for group in range(len(loaded.groups))]
        self._runner = ModelRunner(loaded, sizes, ops, rng=random.Random(seed))
        self.pool_tokens = pool_capacity(loaded.groups, pool_bytes, "native", 16)

    def warm_up(self) -> None:
        """Compile every kernel."""
        self._loaded.model.warm_up()
        warm_up(self._runner, self._loaded.groups, self._pool_bytes, self._clock)

    def run(self, chosen: Sequence[Scenario], done: Callable[[Scenario], None] | None = None) -> Samples:
        """All scenarios in turn, and again, and again, large ones once: a machine that is slower for a while slows a
        little of everything. ``done`` is called after each scenario of each round.
        """
        small = [scenario for scenario in chosen if not is_large(scenario)]
        return pooled([self.play(chosen if number == 0 else small, done) for number in range(REPEATS)])

    def play(self, chosen: Sequence[Scenario], done: Callable[[Scenario], None] | None = None) -> Round:
        """Every scenario once."""
        played: Round = {}
        for scenario in chosen:
            played[scenario] = self._once(scenario)
            if done is not None:
                done(scenario)
        return played

    def _once(self, scenario: Scenario) -> list[TimedStep]:
        loaded, clock, counters = self._loaded, self._clock, Counters()
        values = {
            **default_values(),
            "kv_format": scenario.kv_format,
            "block_size": scenario.block_size,
            "max_num_batched_tokens": scenario.budget,
            "max_num_seqs": 256,
        }
        cache = CacheManager(
            loaded.groups, self._bytes_for(scenario), values, recent_tokens=64, sinks=16, watermark=0.0, clock=clock,
            events=NullSink(), counters=counters,
        )  # fmt: skip
        if scenario.kv_format == NATIVE.name and scenario.then is None:
            self._age(cache, scenario.block_size)
        scheduler = Scheduler(
            cache, values, max_model_len=loaded.config.max_model_len, max_waiting=256, clock=clock, counters=counters,
            recode_tokens_per_step=max(512, scenario.budget),
        )  # fmt: skip
        runner = _TimedRunner(self._runner, StepCounter(loaded.groups), clock, counters)
        core = EngineCore(
            scheduler, cache, runner, values, clock,
            options=CoreOptions("profile", "profile", loaded.config.max_model_len), stats=CoreStats(counters),
        )  # fmt: skip
        if scenario.every:
            self._serve(scenario, core, runner)
            return runner.steps
        # Sequences of the first wave decode while later ones are prefilled: long enough to meet them all.
        waves = scenario.tokens // scenario.budget + 2
        params = SamplingParams(max_tokens=_DECODE_STEPS + 2 + waves + _SWITCH_STEPS, ignore_eos=True)
        for number in range(scenario.batch):
            core.add(self._request(number, scenario.context, params))
        all_decode = 0
        while core.has_work and all_decode <= _DECODE_STEPS:
            runner.step(core)
            decoding = len(scheduler.running) == scenario.batch and not scheduler.num_waiting
            all_decode += decoding and all(len(request.output_ids) > 1 for request in scheduler.running)
        if scenario.then is not None:
            core.patch(Patch(dict([scenario.then]), "profile"))
            for _ in range(_SWITCH_STEPS):
                runner.step(core)
        core.abort_all()
        return runner.steps

    def _serve(self, scenario: Scenario, core: EngineCore, runner: _TimedRunner) -> None:
        # Its own generator: every round plays the same.
        rng = random.Random(f"{scenario.batch} {scenario.context} {scenario.every}")
        left, number = scenario.batch, 0
        while left or core.has_work:
            while left and rng.random() < 1 / (1 + scenario.every):
                prompt_tokens = round(math.exp(rng.uniform(math.log(_SHORTEST), math.log(2 * scenario.context))))
                params = SamplingParams(max_tokens=rng.randint(1, 2 * scenario.output), ignore_eos=True)
                core.add(self._request(number, prompt_tokens, params))
                left, number = left - 1, number + 1
            if core.has_work:
                runner.step(core)

    def _bytes_for(self, scenario: Scenario) -> int:
        """A pool that holds the scenario with room to spare, and is soon full of what earlier requests left."""
        wanted = 2 * scenario.batch * (scenario.context + scenario.output + _DECODED) + _LARGE_TOKENS
        return math.ceil(self._pool_bytes * min(1.0, wanted / self.pool_tokens))

    def _age(self, cache: CacheManager, block_size: int) -> None:
        """Fill the pool with cached blocks of requests that are gone, as that of every server is after a while: whoever
        takes a block takes it from them. Quantised pools are left empty: old blocks would be converted first.
        """
        prompt_tokens = _PARTS_OF_OLD * block_size
        left = pool_capacity(cache.groups, cache.layout.total_bytes, NATIVE.name, block_size)
        for number in range(left // prompt_tokens):
            request = self._request(number, prompt_tokens, SamplingParams(max_tokens=1))
            if not cache.allocate(request, prompt_tokens):
                break
            cache.commit(request, prompt_tokens)
            cache.free(request)

    def _request(self, number: int, prompt_tokens: int, params: SamplingParams) -> Request:
        vocabulary = self._loaded.config.vocab_size
        prompt = [self._random.randrange(vocabulary) for _ in range(prompt_tokens)]
        return Request(f"r{number}", prompt, params, self._clock.now_ns())


def is_large(scenario: Scenario) -> bool:
    """Whether it has many equal steps of its own; repeated as well, it would take most of the time."""
    return scenario.tokens > _LARGE_TOKENS


def pooled(rounds: Sequence[Round]) -> Samples:
    """Of equal steps of all rounds the mean time counts: what a served load takes is a sum, slow steps included. None
    counts for more than three medians, for a pause that long belongs to no kind of step.
    """
    samples, together = Samples(), dict[Scenario, list[list[TimedStep]]]()
    for played in rounds:
        for scenario, steps in played.items():
            together.setdefault(scenario, []).append(steps)
    for repeats in together.values():
        for row in _decodes_together(list(zip(*repeats, strict=False))):
            samples.step_counts.append(row[len(row) // 2].counts)
            samples.step_s.append(_mean_s([step.step_ns for step in row]))
            samples.step_repeats.append(len(row))
        for same in zip(*repeats, strict=False):
            if same[0].recode_counts is not None:
                samples.recode_counts.append(same[0].recode_counts)
                samples.recode_s.append(_mean_s([step.recode_ns for step in same]))
    return samples


def _mean_s(times_ns: Sequence[int]) -> float:
    most = _ODD * statistics.median(times_ns)
    return statistics.fmean(min(time_ns, most) for time_ns in times_ns) / 1e9


def _decodes_together(steps: Sequence[Sequence[TimedStep]]) -> Iterator[list[TimedStep]]:
    """Rows of equal steps over the repeats; consecutive pure decodes of as many sequences are one row."""
    row: list[TimedStep] = []
    last: tuple[int, ...] | None = None
    for same in steps:
        kind = tuple(same[0].counts[index] for index in _KIND)
        if row and (kind != last or kind[0]):
            yield row
            row = []
        row += same
        last = kind
    if row:
        yield row
