"""``offload_tbt_p50_ratio`` and ``offload_ttft_p95_ratio``: what a pool of 0.6 of the working set costs.

Sessions with think time run against a pool of 0.6 of what their conversations take at the end, with the rest on the
host behind an emulated link of a twentieth of the memory's bandwidth, and against a pool that holds everything.
Promised are 1.05 for the median gap between tokens and 1.2 for the 95th percentile of the time to the first token.
Sessions and the driver: see :mod:`engine.cache_bench.sessions`. Copies are made by the engine's own thread here, so
the gaps contain them, which a GPU's would not.
"""

from __future__ import annotations

from engine.bandwidth import measure_bandwidth
from engine.cache_bench.context import Context
from engine.cache_bench.sessions import SessionLoad, SessionShape, quantile, run_together, warm_up
from engine.transfers import HostLink

KEYS = ("offload_tbt_p50_ratio", "offload_ttft_p95_ratio", "offload_latency_detail")

POOL_SHARE = 0.6
LINK_SHARE = 1 / 20


def emulated_link(context: Context) -> HostLink:
    """A twentieth of the measured bandwidth, as an engine takes by default."""
    rate = measure_bandwidth(context.load().model.device) * LINK_SHARE
    return HostLink(rate, rate)


def run(context: Context) -> dict[str, object]:
    """Both ratios, and the quantiles that they were made of."""
    if context.device != "cpu":
        context.skip("the link is emulated: on a GPU it would be measured")
    shape = SessionShape(
        num_sessions=8 if context.quick else 24,
        turns=3 if context.quick else 6,
        first_tokens=320,
        turn_tokens=48,
        output_tokens=48,
        think_s=1.5,
    )
    link = emulated_link(context)
    working_set = shape.num_sessions * shape.final_tokens
    roomy = SessionLoad(context.load(), shape, 2 * working_set, seed=context.seed)
    tight = SessionLoad(
        context.load(),
        shape,
        int(POOL_SHARE * working_set),
        seed=context.seed,
        host_tokens=2 * working_set,
        link=link,
        staging_tokens=working_set // 16,
    )
    warm_up(context.load())
    run_together([roomy, tight])
    figures = {name: _figures(load) for name, load in (("roomy", roomy), ("tight", tight))}
    for name, found in figures.items():
        context.log(f"  {name}: {found}")
    detail = {
        **figures,
        "working_set_tokens": working_set,
        "pool_share": POOL_SHARE,
        "link_bytes_per_s": round(link.in_bytes_per_s),
        "link": "emulated",
        "seed": context.seed,
    }
    return {
        "offload_tbt_p50_ratio": round(figures["tight"]["tbt_p50_ms"] / figures["roomy"]["tbt_p50_ms"], 3),
        "offload_ttft_p95_ratio": round(figures["tight"]["ttft_p95_ms"] / figures["roomy"]["ttft_p95_ms"], 3),
        "offload_latency_detail": detail,
    }


def _figures(load: SessionLoad) -> dict[str, float]:
    tally, counters = load.tally, load.engine.cache.counters
    return {
        "tbt_p50_ms": round(1e3 * quantile(tally.tbt_s, 0.5), 3),
        "tbt_p99_ms": round(1e3 * quantile(tally.tbt_s, 0.99), 3),
        "ttft_p50_ms": round(1e3 * quantile(tally.ttft_s, 0.5), 3),
        "ttft_p95_ms": round(1e3 * quantile(tally.ttft_s, 0.95), 3),
        "requests": len(tally.ttft_s),
        "preemptions": counters.preemptions,
        "hit_tokens": counters.prefix_cache_hits,
        "host_hit_tokens": counters.host_hit_tokens,
        "host_out_mb": round(counters.host_out_bytes / 1e6, 1),
        "host_in_mb": round(counters.host_in_bytes / 1e6, 1),
        "streamed_mb": round(counters.host_streamed_bytes / 1e6, 1),
    }
