"""A toy engine for closed-loop tests of policies: queue, paged memory by format, preemption, budgeted recoding.

It is no model of the real one (that is the simulator's job), but it has the feedback that makes policies flap or
starve: memory fills, requests wait, recoding frees memory late, eviction at once.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from engine.clock import ManualClock
from engine.stats import Counters, EngineStats, Gauges, Histogram, ResidentBytes
from engine.tunables import TUNABLES, TunableValues, default_values
from envs.features import Targets
from envs.live import LiveEngine
from envs.port import ApplyResult, ApplyStatus, Change
from envs.spaces import NOTHING, encode_action
from policies.base import Decision, Policy
from policies.guard import Guard, GuardConfig, GuardContext, Verdict

BYTES = {"native": 256.0, "int8": 140.0, "k8v4": 108.0, "int4": 76.0}  # head_dim 64 in bf16, one head of one layer
RECENT = 64  # tokens of a sequence that stay native


@dataclass(eq=False)
class Sequence:
    arrival_s: float
    prompt: int
    output: int
    computed: int = 0  # tokens with KV
    generated: int = 0
    evicted: int = 0
    lossy: dict[str, int] = field(default_factory=dict)  # tokens by quantised format
    last_s: float = 0.0

    @property
    def native(self) -> int:
        return self.computed - self.evicted - sum(self.lossy.values())

    def used(self, block: int) -> float:
        tail = -self.native % block
        return (self.native + tail) * BYTES["native"] + sum(BYTES[f] * n for f, n in self.lossy.items())


class ToyEngine:
    """Implements envs.port.EnginePort. ``arrivals``: (second, prompt tokens, output tokens) in order of time."""

    def __init__(self, arrivals: list[tuple[float, int, int]], pool_tokens: int, *, step_s: float = 0.02) -> None:
        self.now_s, self.step_s = 0.0, step_s
        self.values: TunableValues = default_values()
        self.pool = pool_tokens * BYTES["native"]
        self.arrivals = list(reversed(arrivals))
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.counters = Counters()
        self.ttft, self.itl = Histogram(), Histogram()
        self.prompts, self.outputs = Histogram(), Histogram()
        self.revision = 0
        self.good = 0
        self.finished: list[Sequence] = []
        self.targets = Targets()

    def used(self) -> float:
        return sum(s.used(int(self.values["block_size"])) for s in self.running)

    def step(self) -> None:
        self.now_s += self.step_s
        while self.arrivals and self.arrivals[-1][0] <= self.now_s:
            arrival_s, prompt, output = self.arrivals.pop()
            self.waiting.append(Sequence(arrival_s, prompt, output))
            self.counters.requests_offered += 1
            self.counters.offered_prompt_tokens += prompt
            self.prompts.observe(prompt / 1000)
        self._recode()
        self._evict()
        self._admit()
        self._preempt()
        budget = int(self.values["max_num_batched_tokens"])
        for s in list(self.running):
            if s.computed < s.prompt + s.generated:
                chunk = min(budget, s.prompt + s.generated - s.computed)
                budget -= chunk
                s.computed += chunk
            else:
                s.computed += 1
            if s.computed >= s.prompt + s.generated:
                self._token(s)
        self.counters.steps += 1
        self.counters.step_time_ns += round(self.step_s * 1e9)

    def _token(self, s: Sequence) -> None:
        if s.generated == 0:
            self.ttft.observe(self.now_s - s.arrival_s)
            s.first_ok = self.now_s - s.arrival_s <= self.targets.ttft_s  # type: ignore[attr-defined]
        else:
            self.itl.observe(self.now_s - s.last_s)
        s.generated += 1
        s.last_s = self.now_s
        self.counters.generation_tokens += 1
        if s.generated >= s.output:
            self.running.remove(s)
            self.finished.append(s)
            self.counters.requests_completed += 1
            self.counters.prompt_tokens += s.prompt
            self.outputs.observe(s.output / 1000)
            self.good += s.first_ok  # type: ignore[attr-defined]

    def _recode(self) -> None:
        budget, target = 512, str(self.values["kv_format"])
        rank = TUNABLES["kv_format"].values.index
        if target == "native":
            return
        for s in self.running:
            sources = [f for f in s.lossy if rank(f) < rank(target)]
            for source in sources:
                moved = min(budget, s.lossy[source])
                s.lossy[source] -= moved
                s.lossy[target] = s.lossy.get(target, 0) + moved
                budget -= moved
            moved = max(0, min(budget, s.native - RECENT) // 32 * 32)
            s.lossy[target] = s.lossy.get(target, 0) + moved
            budget -= moved
            self.counters.recoded_tokens += moved

    def _evict(self) -> None:
        if self.values["eviction"] != "window":
            return
        for s in self.running:
            excess = (s.computed - s.evicted - int(self.values["keep_tokens"])) // 32 * 32 if s.generated else 0
            for f in list(s.lossy):
                dropped = max(0, min(excess, s.lossy[f]))
                s.lossy[f] -= dropped
                s.evicted += dropped
                excess -= dropped
                self.counters.evicted_tokens += dropped
            if excess > 0:
                s.evicted += excess
                self.counters.evicted_tokens += excess

    def _admit(self) -> None:
        while self.waiting and len(self.running) < int(self.values["max_num_seqs"]):
            s = self.waiting[0]
            need = sum((r.prompt + r.generated - r.computed) * BYTES["native"] for r in self.running)
            if self.used() + need + (s.prompt + s.generated) * BYTES["native"] > 0.97 * self.pool:
                return
            self.running.append(self.waiting.pop(0))

    def _preempt(self) -> None:
        while self.running and self.used() > self.pool - len(self.running) * BYTES["native"]:
            s = self.running.pop()
            s.computed, s.evicted, s.lossy = 0, 0, {}
            self.waiting.insert(0, s)
            self.counters.preemptions += 1

    def read(self) -> EngineStats:
        rows = {f: sum(s.lossy.get(f, 0) for s in self.running) for f in ("int8", "k8v4", "int4")}
        native = sum(s.native for s in self.running)
        block = int(self.values["block_size"])
        resident = [ResidentBytes(f, max(32, block), round(n * BYTES[f]), n) for f, n in rows.items() if n]
        resident.append(ResidentBytes("native", block, round(native * BYTES["native"]), native))
        gauges = Gauges(
            running=len(self.running),
            waiting=len(self.waiting),
            kv_usage=min(1.0, self.used() / self.pool),
            kv_pool_bytes=round(self.pool),
            resident=resident,
            resident_tokens=sum(s.computed for s in self.running),
            kv_used_bytes=round(self.used()),
            evicted_running_tokens=sum(s.evicted for s in self.running),
            kv_bytes_per_token=dict(BYTES),
        )
        return EngineStats(
            "toy", "toy", round(self.now_s * 1e9), 4096, int(self.values["max_num_seqs"]), self.revision,
            dict(self.values), Counters(**vars(self.counters)), gauges,
            ttft=_copy(self.ttft), itl=_copy(self.itl), prompt_lengths=_copy(self.prompts),
            output_lengths=_copy(self.outputs),
        )  # fmt: skip

    def apply(self, change: Change) -> ApplyResult:
        self.values[change.knob] = change.value
        self.revision += 1
        return ApplyResult(ApplyStatus.APPLIED, "", change, self.revision)


def _copy(histogram: Histogram) -> Histogram:
    return Histogram(list(histogram.counts), histogram.sum_s)


@dataclass
class Run:
    """What a closed loop did. ``changes``: (second, change, scenario, reason)."""

    engine: ToyEngine
    changes: list[tuple[float, Change, str, str]]
    decisions: list[Decision]
    verdicts: list[Verdict]

    @property
    def knobs(self) -> set[str]:
        return {change.knob for _, change, _, _ in self.changes}


def closed_loop(
    engine: ToyEngine, policy: Policy, seconds: float, *, window_s: float = 5.0, config: GuardConfig | None = None
) -> Run:
    """Tick once per simulated second: the daemon's loop without the daemon."""
    clock = ManualClock()
    env = LiveEngine(engine, short_s=window_s, long_s=60, clock=clock)
    guard = Guard(config or GuardConfig(window_s=window_s))
    state, guard_state = policy.initial_state(), guard.initial_state()
    run = Run(engine, [], [], [])
    env.reset()
    for tick in range(int(seconds)):
        decision, state = policy.decide(env.observation, state)
        verdict, guard_state = guard.check(decision.change, GuardContext(env.observation), guard_state)
        env.act(NOTHING if verdict.change is None else encode_action(verdict.change))
        run.decisions.append(decision)
        run.verdicts.append(verdict)
        if verdict.change is not None:
            run.changes.append((float(tick), verdict.change, decision.scenario, decision.reason))
        for _ in range(round(1 / engine.step_s)):
            engine.step()
        clock.advance_s(1.0)
        env.observe()
    return run


def bursty(seconds: float, *, calm_rps: float, peak_rps: float, seed: int) -> list[tuple[float, int, int]]:
    """Poisson arrivals, 20 s calm and 15 s peak in turn; lognormal lengths with a long tail."""
    rng, now_s, arrivals = random.Random(seed), 0.0, []
    while now_s < seconds:
        now_s += rng.expovariate(peak_rps if now_s % 35 >= 20 else calm_rps)
        prompt = min(3000, max(8, round(rng.lognormvariate(5.3, 0.9))))
        arrivals.append((now_s, prompt, min(400, max(4, round(rng.lognormvariate(4.0, 0.6))))))
    return arrivals


@pytest.fixture
def toy() -> type[ToyEngine]:
    return ToyEngine


@pytest.fixture
def loop() -> Callable[..., Run]:
    return closed_loop


@pytest.fixture
def burst() -> Callable[..., list[tuple[float, int, int]]]:
    return bursty
