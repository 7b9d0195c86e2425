"""Runs every kernel once before the first client comes: compiling them would otherwise stall the first requests."""

from __future__ import annotations

from collections.abc import Sequence

from engine.cache_manager import CacheManager
from engine.clock import Clock
from engine.events import NullSink
from engine.memory_model import GroupSpec
from engine.request import Request, SamplingParams
from engine.runner import Runner
from engine.scheduler import Scheduler
from engine.tunables import default_values
from kernels.layout import FORMATS, NATIVE

_PROMPT_TOKENS = 100
_STEPS_PER_FORMAT = 3
_KEEP_TOKENS = 128


def warm_up(runner: Runner, groups: Sequence[GroupSpec], pool_bytes: int, clock: Clock) -> None:
    """Compute a few throw-away sequences in every format, and some whose attention is observed, over own bookkeeping.

    ``pool_bytes`` must be what the runner's arenas were made for. What is left in the arenas is never read.
    """
    # From native straight to each format, and from there through the lossier ones.
    passes = [([kind.name for kind in FORMATS if kind.lossiness >= first.lossiness], "none") for first in FORMATS]
    for formats, eviction in [*passes, ([NATIVE.name], "heavy_hitter")]:
        values = {**default_values(), "block_size": 32, "eviction": eviction, "keep_tokens": _KEEP_TOKENS}
        cache = CacheManager(
            groups, pool_bytes, values, recent_tokens=0, sinks=0, watermark=0.0, clock=clock, events=NullSink()
        )
        scheduler = Scheduler(cache, values, max_model_len=1 << 20, max_waiting=8, clock=clock, sync_recode=True)
        for request in _requests(f"{formats[0]}-{eviction}", clock):
            scheduler.add(request)
        for kv_format in formats:
            scheduler.apply({**values, "kv_format": kv_format})
            for _ in range(_STEPS_PER_FORMAT):
                plan = scheduler.schedule()
                runner.recode(plan.recodes)
                scheduler.update(plan, runner.execute(plan, cache))


def _requests(name: str, clock: Clock) -> list[Request]:
    """More tokens than steps: only a request that eviction could reach is observed."""
    sampled = SamplingParams(max_tokens=_KEEP_TOKENS, temperature=1.0, top_p=0.9, top_k=50, seed=0, ignore_eos=True)
    greedy = SamplingParams(max_tokens=_KEEP_TOKENS, ignore_eos=True)
    return [
        Request(f"warm-up-{name}-{i}", [1 + i] * _PROMPT_TOKENS, params, clock.now_ns())
        for i, params in enumerate((greedy, sampled))
    ]
