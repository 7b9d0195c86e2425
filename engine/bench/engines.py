"""An engine without a server, put together as the server's is, and loads that keep it busy."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.bench.parts import PartTimes, TimedOps, watch
from engine.cache_manager import CacheManager
from engine.clock import Clock
from engine.core import EngineCore
from engine.core_options import CoreOptions
from engine.core_stats import CoreStats
from engine.events import NullSink
from engine.loader import load_model
from engine.model_runner import ModelRunner
from engine.request import Request, SamplingParams
from engine.scheduler import Scheduler
from engine.stats import Counters
from engine.tunables import TunableValue, default_values
from engine.warmup import warm_up
from kernels import ops

_RECODE_SHARE = 0.15  # as a served engine has it


class BenchClock:
    """Whatever clock a benchmark goes by, as an engine wants it."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self.now_ns = now_ns

    def wall_s(self) -> float:
        return 0.0


@dataclass
class BenchEngine:
    """``parts`` counts only while ``core`` steps."""

    core: EngineCore
    scheduler: Scheduler
    cache: CacheManager
    runner: ModelRunner
    parts: PartTimes
    vocab_size: int
    clock: Clock
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    _number: int = 0

    def request(self, prompt_tokens: int, output_tokens: int) -> Request:
        """A prompt of random ids, greedy, without an end of its own."""
        self._number += 1
        prompt = [self.rng.randrange(10, self.vocab_size) for _ in range(prompt_tokens)]
        params = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
        return Request(f"bench-{self._number}", prompt, params, self.clock.now_ns())


def build(
    folder: Path,
    now_ns: Callable[[], int],
    *,
    pool_bytes: int,
    values: Mapping[str, TunableValue] | None = None,
    is_timed: bool = True,
) -> BenchEngine:
    """``values``: tunables that differ from their defaults. ``is_timed``: count the time of parts."""
    loaded = load_model(folder)
    clock = BenchClock(now_ns)
    counters = Counters()
    all_values = {**default_values(), "max_num_seqs": 256, **(values or {})}
    cache = CacheManager(
        loaded.groups, pool_bytes, all_values, recent_tokens=64, sinks=16, watermark=0.01, clock=clock,
        events=NullSink(), counters=counters,
    )  # fmt: skip
    parts = PartTimes(now_ns)
    used: Any = TimedOps(ops, parts) if is_timed else ops
    sizes = [cache.group_arena_bytes(group) for group in range(len(loaded.groups))]
    runner = ModelRunner(loaded, sizes, used, rng=random.Random(0), whole_steps=True)
    ops.warm_up(loaded.model.device, loaded.model.dtype)
    loaded.model.warm_up()
    warm_up(runner, loaded.groups, pool_bytes, clock)
    scheduler = Scheduler(
        cache, all_values, max_model_len=loaded.config.max_model_len, max_waiting=1 << 20, clock=clock,
        counters=counters, eos_token_ids=loaded.eos_token_ids,
    )  # fmt: skip
    core = EngineCore(
        scheduler, cache, runner, all_values, clock,
        options=CoreOptions("bench", "bench", loaded.config.max_model_len, recode_share=_RECODE_SHARE),
        stats=CoreStats(counters),
    )  # fmt: skip
    if is_timed:
        watch(core, runner, parts)
    return BenchEngine(core, scheduler, cache, runner, parts, loaded.config.vocab_size, clock)


def decode_steps(engine: BenchEngine, batch: int, prompt: int, steps: int, settle: int = 8) -> float:
    """Median nanoseconds of a step in which ``batch`` sequences decode and nothing else happens; all end after it.

    ``settle``: such steps before those that count, after which all is converted that can be. The first counted one
    finds contexts of ``prompt + settle`` tokens.
    """
    core, clock = engine.core, engine.clock
    # While later prompts are computed, earlier ones decode already.
    room = settle + steps + batch * prompt // 256 + batch + 2
    live = [engine.request(prompt, room) for _ in range(batch)]
    for request in live:
        core.add(request)
    while not all(request.output_ids for request in live):
        core.step()
    for _ in range(settle):
        core.step()
    while core.has_background_work:  # what is old has its format before anything counts
        core.background()
    engine.parts.reset()
    times = []
    for _ in range(steps):
        begin_ns = clock.now_ns()
        core.step()
        times.append(clock.now_ns() - begin_ns)
    core.abort_all()
    return statistics.median(times)


@dataclass(frozen=True)
class LoopFigures:
    """One closed loop. Seconds by the benchmark's clock."""

    tokens_per_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    tpot_p50_s: float
    tpot_p95_s: float

    def to_json(self) -> dict[str, float]:
        return {name: round(value, 1 if name == "tokens_per_s" else 6) for name, value in self.__dict__.items()}


def closed_loop(engine: BenchEngine, concurrency: int, requests: int, prompt: int, output: int) -> LoopFigures:
    """So many requests in all, each begun when another ends."""
    core, clock = engine.core, engine.clock
    begun = ended = tokens = 0
    added: dict[str, int] = {}
    first: dict[str, int] = {}
    ttft, tpot = [], []
    begin_ns = clock.now_ns()
    while ended < requests:
        while begun < requests and len(added) < concurrency:
            request = engine.request(prompt, output)
            added[request.request_id] = clock.now_ns()
            core.add(request)
            begun += 1
        deltas = core.step()
        now_ns = clock.now_ns()
        for delta in deltas:
            name = delta.request_id
            tokens += len(delta.token_ids)
            if name not in first:
                first[name] = now_ns
                ttft.append((now_ns - added[name]) / 1e9)
            if delta.finish_reason is not None:
                if delta.error is not None:
                    raise RuntimeError(delta.error)
                tpot.append((now_ns - first[name]) / 1e9 / max(1, output - 1))
                del added[name]
                ended += 1
    elapsed_s = (clock.now_ns() - begin_ns) / 1e9
    return LoopFigures(tokens / elapsed_s, _at(ttft, 50), _at(ttft, 95), _at(tpot, 50), _at(tpot, 95))


def _at(values: list[float], percent: int) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]
