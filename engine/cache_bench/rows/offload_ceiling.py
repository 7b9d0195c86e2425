"""``tier_share_of_ceiling``: how much of what a host tier could gain at most it gains, with a working set of 3 pools.

Sessions take turns over a few clients without think time, so that every turn finds its conversation pushed out of the
device's pool. Three engines run the same sessions: without a host tier (time T), with one (T', waits for the emulated
link included), and, for the count of what can be hit at all, with a pool that holds everything.

The ceiling follows Amdahl. Of T, each prefill token has taken c seconds: least squares over the steps, whose time is a
constant and so much per decode and per prefill token. With the tier P' tokens were prefilled instead of P; had the hits
cost nothing, it would have taken T - c (P - P'). The gain is T / T' - 1, the ceiling T / (T - c (P - P')) - 1, or the
gain of the pool that holds everything if that is larger (steps that have nothing left to do vanish whole), and the
figure their ratio. Promised are 0.8, at a tier hit ratio (hits over those of the pool that holds everything) of 0.9.

Beside it, Mooncake's conversation trace through the bookkeeping alone: hit ratio with 10,000 blocks on the device, and
with 20,000 more on the host behind a link that keeps up.
"""

from __future__ import annotations

import numpy as np

from engine.cache_bench.context import Context
from engine.cache_bench.rows.hit_ratio import NUM_BLOCKS, TRACE, read_trace, replay
from engine.cache_bench.rows.offload_latency import emulated_link
from engine.cache_bench.sessions import SessionLoad, SessionShape, quantile, run_together, warm_up

KEYS = (
    "tier_share_of_ceiling",
    "tier_hit_ratio",
    "tier_ttft_p90_ms",
    "tier_detail",
    "mooncake_tier_hit_ratio",
)

_POOLS = 3  # the working set in pools


def run(context: Context) -> dict[str, object]:
    """The figure, what it was made of, and the trace's hit ratios (null without traces)."""
    if context.device != "cpu":
        context.skip("the link is emulated: on a GPU it would be measured")
    shape = SessionShape(
        num_sessions=12 if context.quick else 36,
        turns=3 if context.quick else 5,
        first_tokens=700,
        turn_tokens=40,
        output_tokens=24,
        think_s=0.0,
        clients=3,
    )
    link = emulated_link(context)
    working_set = shape.num_sessions * shape.final_tokens
    pool = working_set // _POOLS
    seed = context.seed
    none = SessionLoad(context.load(), shape, pool, seed=seed)
    tier = SessionLoad(context.load(), shape, pool, seed=seed, host_tokens=2 * working_set, link=link)
    everything = SessionLoad(context.load(), shape, 2 * working_set, seed=seed)
    warm_up(context.load())
    run_together([none, tier, everything])
    seconds = {name: load.clock.now_ns() / 1e9 for name, load in _named(none, tier, everything)}
    prefill_s = prefill_seconds(none)
    saved = none.tally.prefill_tokens - tier.tally.prefill_tokens
    gain = seconds["none"] / seconds["tier"] - 1
    computed = seconds["none"] / (seconds["none"] - prefill_s * saved) - 1
    reached = seconds["none"] / seconds["everything"] - 1
    hits = {name: load.engine.cache.counters.prefix_cache_hits for name, load in _named(none, tier, everything)}
    detail = {
        "gain": round(gain, 3),
        "ceiling_computed": round(computed, 3),
        "gain_of_a_pool_for_everything": round(reached, 3),
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
        "waited_for_the_link_s": round(tier.tally.waited_s, 3),
        "prefill_share": round(prefill_s * none.tally.prefill_tokens / seconds["none"], 3),
        "prefill_tokens": {name: load.tally.prefill_tokens for name, load in _named(none, tier, everything)},
        "hit_tokens": hits,
        "host_hit_tokens": tier.engine.cache.counters.host_hit_tokens,
        "ttft_p90_ms": {
            name: round(1e3 * quantile(load.tally.ttft_s, 0.9), 1) for name, load in _named(none, tier, everything)
        },
        "working_set_tokens": working_set,
        "pool_tokens": pool,
        "link_bytes_per_s": round(link.in_bytes_per_s),
        "link": "emulated",
        "seed": seed,
    }
    context.log(f"  {detail}")
    return {
        "tier_share_of_ceiling": round(gain / max(computed, reached), 3),
        "tier_hit_ratio": round(hits["tier"] / hits["everything"], 3),
        "tier_ttft_p90_ms": round(1e3 * quantile(tier.tally.ttft_s, 0.9), 1),
        "tier_detail": detail,
        "mooncake_tier_hit_ratio": mooncake(context),
    }


def _named(none: SessionLoad, tier: SessionLoad, everything: SessionLoad) -> list[tuple[str, SessionLoad]]:
    return [("none", none), ("tier", tier), ("everything", everything)]


def prefill_seconds(load: SessionLoad) -> float:
    """Seconds per prefill token by least squares over the steps."""
    steps = np.array(load.tally.steps)
    design = np.column_stack([np.ones(len(steps)), steps[:, 0], steps[:, 1]])
    solution, *_ = np.linalg.lstsq(design, steps[:, 2], rcond=None)
    return float(solution[2])


def mooncake(context: Context) -> dict[str, float] | None:
    """Hit blocks over all blocks, without and with a host tier of twice the device's size."""
    if context.traces is None or not (context.traces / TRACE).exists():
        context.log(f"  needs traces for {TRACE}")
        return None
    rows = read_trace(context.traces / TRACE)[: 500 if context.quick else 3000]
    total = sum(len(chain) for _, chain in rows)
    found = {
        "device_only": sum(replay(rows, "lru")) / total,
        "with_host": sum(replay(rows, "lru", host_blocks=2 * NUM_BLOCKS)) / total,
        "device_of_that_size": sum(replay(rows, "lru", 3 * NUM_BLOCKS)) / total,
    }
    return {name: round(value, 4) for name, value in found.items()} | {"requests": float(len(rows))}
