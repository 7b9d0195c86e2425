"""Rows of ``python -m envs.bench_sim`` that are exact, or count: capacity, prefix hits, random actions."""

from __future__ import annotations

import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Final

from engine.cache_manager import CacheManager
from engine.clock import ManualClock
from engine.events import NullSink
from engine.formats import BlockClass
from engine.memory_model import RESERVE_SLABS, GroupSpec
from engine.tunables import TunableValue, default_values
from envs.bench_context import POOL_BYTES, Bench, Context, small
from envs.fidelity import at_rate, capacity_rps, simulate
from envs.profile import capacities
from envs.shake import Shaken, pieces, shake

_HIT_SHARE: Final = 0.7  # of capacity
_QUICK_SHAKE: Final = 5_000


def handed_out(groups: list[GroupSpec], pool_bytes: int, block_class: BlockClass) -> int:
    """Blocks of one class that the engine's own pool gives before it has no more, its reserve kept: least of groups."""
    cache = CacheManager(
        groups, pool_bytes, default_values(), recent_tokens=64, sinks=16, watermark=0.0, clock=ManualClock(),
        events=NullSink(),
    )  # fmt: skip
    counts = []
    for pool in cache._pools:  # noqa: SLF001  # what is asked for is what it really gives
        count = 0
        while pool.take(block_class, count * block_class.block_size, keep_slabs=RESERVE_SLABS) is not None:
            count += 1
        counts.append(count)
    return min(counts)


def capacity(context: Context) -> dict[str, Any]:
    """Blocks of every class that a profile promises against those that the engine's pool hands out."""
    from engine.loader import load_model  # noqa: PLC0415

    groups = list(load_model(context.model).groups)
    rows = capacities(groups, POOL_BYTES)
    wrong = [
        f"{row.kv_format} in {row.block_size}: {row.blocks} and {found}"
        for row in rows
        if (found := handed_out(groups, POOL_BYTES, BlockClass(row.kv_format, row.block_size))) != row.blocks
    ]
    context.log(f"capacity: {len(rows)} classes, {'; '.join(wrong) or 'all exact'}")
    return {"capacity_exact": not wrong, "capacity_classes": len(rows)}


def hits(context: Context) -> dict[str, Any]:
    """Prefix hits of a live run against its simulation: under its recorded times, and running freely."""
    bench = Bench(context)
    base = small(context.trace("mooncake_conversation_train", "agent-shared-prefix", 600.0))
    values: dict[str, TunableValue] = {}
    options, groups, model = bench.options(values), bench.groups, bench.model
    rate = _HIT_SHARE * capacity_rps(groups, model, base, options)
    trace = at_rate(base, rate, 6.0 if context.quick else 12.0)
    live, record = bench.live.record(trace, options)
    played, differing = bench.live.play_back(trace, options, record)
    _, free = simulate(groups, model, trace, options)
    found, freely = live.counters.prefix_cache_hits, free.stats().counters.prefix_cache_hits
    exact = not differing and played == live.counters
    off_pct = 100 * abs(freely - found) / found if found else None
    context.log(
        f"hits: {found} of {live.counters.prefix_cache_queries} prompt tokens live, {played.prefix_cache_hits} under "
        f"its times ({len(record.steps)} steps, {len(differing)} decided otherwise), {freely} running freely"
    )
    return {
        "hit_counts_exact": exact,
        "hit_counts_live": found,
        "hit_counts_free_running_err_pct": off_pct,
    }


def shaken(context: Context) -> dict[str, Any]:
    """Random actions: how many, how fast, and that nothing broke (it raises otherwise)."""
    steps = min(context.shake_steps, _QUICK_SHAKE) if context.quick else context.shake_steps
    total, begin_s, told = Shaken(), time.perf_counter(), 0
    with ProcessPoolExecutor(max(1, context.processes)) as pool:
        for one in pool.map(_shake, pieces(steps, seed=0)):
            total.add(one)
            if total.steps - told >= steps / 20:
                told = total.steps
                context.log(f"shake: {total}, {total.steps / (time.perf_counter() - begin_s):.0f} steps/s")
    return {f"shake_{name}": value for name, value in vars(total).items()} | {
        "shake_wall_s": time.perf_counter() - begin_s,
        "shake_processes": context.processes,
    }


def _shake(piece: tuple[int, int]) -> Shaken:
    return shake(*piece)
