"""Runs every kernel once before the first client comes: compiling them would otherwise stall the first requests."""

from __future__ import annotations

from collections.abc import Sequence

from engine.cache_manager import CacheManager
from engine.clock import Clock
from engine.core import Runner
from engine.events import NullSink
from engine.memory_model import GroupSpec
from engine.request import Request, SamplingParams
from engine.scheduler import Scheduler
from engine.tunables import default_values
from kernels.layout import FORMATS

_PROMPT_TOKENS = 100
_STEPS_PER_FORMAT = 3


def warm_up(runner: Runner, groups: Sequence[GroupSpec], pool_bytes: int, clock: Clock) -> None:
    """Compute a few throw-away sequences in every format, over bookkeeping of their own.

    ``pool_bytes`` must be what the runner's arenas were made for. What is left in the arenas is never read.
    """
    for first in FORMATS:
        # From native straight to each format, and from there through the lossier ones.
        formats = [kv_format.name for kv_format in FORMATS if kv_format.lossiness >= first.lossiness]
        values = {**default_values(), "block_size": 32}
        cache = CacheManager(
            groups, pool_bytes, values, recent_tokens=0, sinks=0, watermark=0.0, clock=clock, events=NullSink()
        )
        scheduler = Scheduler(cache, values, max_model_len=1 << 20, max_waiting=8, clock=clock, sync_recode=True)
        for request in _requests(first.name, len(formats) * _STEPS_PER_FORMAT, clock):
            scheduler.add(request)
        for kv_format in formats:
            scheduler.apply({**values, "kv_format": kv_format})
            for _ in range(_STEPS_PER_FORMAT):
                plan = scheduler.schedule()
                runner.recode(plan.recodes)
                scheduler.update(plan, runner.execute(plan, cache))


def _requests(name: str, num_tokens: int, clock: Clock) -> list[Request]:
    sampled = SamplingParams(max_tokens=num_tokens, temperature=1.0, top_p=0.9, top_k=50, seed=0, ignore_eos=True)
    greedy = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    return [
        Request(f"warm-up-{name}-{i}", [1 + i] * _PROMPT_TOKENS, params, clock.now_ns())
        for i, params in enumerate((greedy, sampled))
    ]
