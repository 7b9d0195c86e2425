"""``conversion_*``: a full pool goes from native to int4 while requests decode.

The whole engine as it is served, defaults included, but for the HTTP server: a pool is filled to nine tenths with idle
prefixes and running requests; these decode for a while (*steady*), then ``kv_format`` is set to int4 by the same call
as behind ``PATCH /v1/tunables``. The conversion lasts until every block that is due has been converted. A gap is the
time between two tokens of a request; the ratio is the 99th percentile of all gaps during the conversion, that of the
change itself included, over the one of all gaps before it.

Two loads: *many*, twelve requests of 3,000 tokens in 256 MiB (87,000 tokens of the bundled model), whose steps are
slow, and *one*, a request of 500 tokens in 128 MiB, whose steps are so fast that any work beside them shows. The time
is that of the full 256 MiB, the ratio the worse of both. Another load on the machine that comes or goes between the
two phases spoils a ratio.

What is traded: recoding takes a share of every step's time (``engine/recode_pacer.py``). A larger one converts sooner
and widens every gap in proportion. ``--recode-budget`` fixes tokens per step instead; the details say how many there
were, and how many per second.
"""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.assembly import assemble
from engine.cache_bench.context import Context
from engine.clock import Clock
from engine.core import EngineCore
from engine.memory_model import token_bytes
from engine.options import EngineOptions
from engine.request import Request, SamplingParams
from engine.tunable_state import Patch

KEYS = ("conversion_s", "conversion_tbt_p99_ratio", "conversion_detail")

_SHARE_FILLED = 0.9
_PREFIX_TOKENS = 2000
_OUTPUT_TOKENS = 1500  # more than there are steps in the measurement: nobody ends in it


@dataclass(frozen=True)
class Load:
    """A pool, and how many requests of how many prompt tokens decode in it, measured for how many steps before."""

    pool_bytes: int
    running: int
    prompt_tokens: int
    steady_steps: int


_LOADS = {"many": Load(256 << 20, 12, 3000, 150), "one": Load(128 << 20, 1, 500, 400)}
_QUICK_LOADS = {"many": Load(32 << 20, 4, 400, 40), "one": Load(16 << 20, 1, 100, 40)}


@dataclass
class Gaps:
    """Steps of an engine, and nanoseconds between the tokens of each request."""

    core: EngineCore
    clock: Clock
    gaps_ns: list[int] = field(default_factory=list)
    last_ns: dict[str, int] = field(default_factory=dict)
    steps: int = 0

    def run(self, until: Callable[[], bool]) -> None:
        """Step until a condition holds. Raises RuntimeError when a request ends first."""
        while not until():
            deltas = self.core.step()
            now_ns = self.clock.now_ns()
            self.steps += 1
            for delta in deltas:
                if delta.finish_reason is not None:
                    raise RuntimeError(delta.error or "a request ended before the measurement did")
                if delta.token_ids:
                    if delta.request_id in self.last_ns:
                        self.gaps_ns.append(now_ns - self.last_ns[delta.request_id])
                    self.last_ns[delta.request_id] = now_ns

    def next_phase(self) -> Gaps:
        """Go on with gaps of its own; the first ones reach back to the last tokens of this phase."""
        return Gaps(self.core, self.clock, last_ns=dict(self.last_ns))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of them do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def run(context: Context) -> dict[str, object]:
    """Seconds, ratio, and what went on under each load."""
    detail = {name: convert(context, load) for name, load in (_QUICK_LOADS if context.quick else _LOADS).items()}
    for name, figures in detail.items():
        context.log(f"  {name}: {figures}")
    return {
        "conversion_s": detail["many"]["conversion_s"],
        "conversion_tbt_p99_ratio": max(figures["tbt_p99_ratio"] for figures in detail.values()),
        "conversion_detail": detail,
    }


def convert(context: Context, load: Load) -> dict[str, float]:
    """Build an engine, fill it, and measure."""
    options = EngineOptions(
        model=context.model,
        device=context.device,
        kv_pool_bytes=load.pool_bytes,
        tunables={"max_num_batched_tokens": 512},
        seed=context.seed,
    )
    assembly = assemble(options)
    core, clock = assembly.core, assembly.clock
    per_token = sum(token_bytes(group.shape) for group in context.load().groups)
    rng = random.Random(context.seed)
    fill(core, clock, load, rng, vocabulary=assembly.served.vocab_size, per_token=per_token)
    filled = sum(row.bytes for row in core.stats().gauges.resident) / load.pool_bytes
    gc.collect()
    gc.freeze()  # as in a served engine
    try:
        figures = measure(core, clock, load.steady_steps)
    finally:
        gc.unfreeze()
    return {"pool_bytes": load.pool_bytes, "filled_share": round(filled, 3), "running": load.running, **figures}


def fill(core: EngineCore, clock: Clock, load: Load, rng: random.Random, *, vocabulary: int, per_token: float) -> None:
    """Idle prefixes, then running requests that have all got their first token."""

    def add(name: str, prompt_tokens: int, output_tokens: int) -> None:
        prompt = [rng.randrange(vocabulary) for _ in range(prompt_tokens)]
        params = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
        core.add(Request(name, prompt, params, clock.now_ns()))

    idle = int(_SHARE_FILLED * load.pool_bytes / per_token) - load.running * load.prompt_tokens
    while idle > 0:
        add(f"prefix-{idle}", min(idle, _PREFIX_TOKENS), 1)
        idle -= _PREFIX_TOKENS
        while core.has_work:
            core.step()
    for index in range(load.running):
        add(f"load-{index}", load.prompt_tokens, _OUTPUT_TOKENS)
    started: set[str] = set()
    while len(started) < load.running:
        started.update(delta.request_id for delta in core.step() if delta.token_ids)


def measure(core: EngineCore, clock: Clock, steady_steps: int) -> dict[str, float]:
    """Steady state, then the change, until all that is due is in int4."""
    steady = Gaps(core, clock)
    steady.run(lambda: steady.steps >= steady_steps)
    before = core.stats().counters
    during = steady.next_phase()
    begin_ns = clock.now_ns()
    core.patch(Patch({"kv_format": "int4"}, "bench"))
    during.run(lambda: not core.has_background_work and core.stats().gauges.converged_fraction == 1.0)
    elapsed_ns = clock.now_ns() - begin_ns
    after = core.stats().counters
    recoded = after.recoded_tokens - before.recoded_tokens
    p99 = percentile(steady.gaps_ns, 0.99)
    return {
        "conversion_s": round(elapsed_ns / 1e9, 2),
        "tbt_p99_ratio": round(percentile(during.gaps_ns, 0.99) / p99, 3),
        "recoded_tokens": recoded,
        "steps": during.steps,
        "recoded_tokens_per_step": round(recoded / during.steps),
        "recoded_tokens_per_s": round(recoded / elapsed_ns * 1e9),
        "recode_time_share": round((after.recode_time_ns - before.recode_time_ns) / elapsed_ns, 3),
        "steady_tbt_p50_ms": round(percentile(steady.gaps_ns, 0.5) / 1e6, 2),
        "steady_tbt_p99_ms": round(p99 / 1e6, 2),
        "tbt_p50_ms": round(percentile(during.gaps_ns, 0.5) / 1e6, 2),
        "tbt_p99_ms": round(percentile(during.gaps_ns, 0.99) / 1e6, 2),
        "tbt_max_ms": round(max(during.gaps_ns) / 1e6, 2),
    }
