"""``offload_tbt_p50_ratio`` and ``offload_ttft_p95_ratio``: what a pool of 0.6 of the working set costs.

Sessions with think time run against a pool of 0.6 of what their conversations take at the end, with the rest on the
host behind an emulated link of a twentieth of the memory's bandwidth, and against a pool that holds everything.
Promised are 1.05 for the median gap between tokens and 1.2 for the 95th percentile of the time to the first token.
Sessions and the driver: see :mod:`engine.cache_bench.sessions`. Copies are made by the engine's own thread here, so
the gaps contain them, which a GPU's would not.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.bandwidth import measure_bandwidth
from engine.cache_bench.context import Context
from engine.cache_bench.sessions import SessionLoad, SessionShape, quantile, run_together, warm_up
from engine.transfers import HostLink

KEYS = ("offload_tbt_p50_ratio", "offload_ttft_p95_ratio", "offload_latency_detail")

POOL_SHARE = 0.6
_PAIRS = 4  # runs of each, one seed after the other: a 95th percentile needs some hundred requests
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
    warm_up(context.load())
    roomy: list[SessionLoad] = []
    tight: list[SessionLoad] = []
    for seed in range(context.seed, context.seed + (1 if context.quick else _PAIRS)):
        roomy.append(SessionLoad(context.load(), shape, 2 * working_set, seed=seed))
        tight.append(
            SessionLoad(
                context.load(),
                shape,
                int(POOL_SHARE * working_set),
                seed=seed,
                host_tokens=2 * working_set,
                link=link,
                staging_tokens=working_set // 16,
            )
        )
        run_together([roomy[-1], tight[-1]])
    figures = {name: _figures(loads) for name, loads in (("roomy", roomy), ("tight", tight))}
    for name, found in figures.items():
        context.log(f"  {name}: {found}")
    detail = {
        **figures,
        "working_set_tokens": working_set,
        "pool_share": POOL_SHARE,
        "link_bytes_per_s": round(link.in_bytes_per_s),
        "link": "emulated",
        "first_seed": context.seed,
    }
    return {
        "offload_tbt_p50_ratio": round(figures["tight"]["tbt_p50_ms"] / figures["roomy"]["tbt_p50_ms"], 3),
        "offload_ttft_p95_ratio": round(figures["tight"]["ttft_p95_ms"] / figures["roomy"]["ttft_p95_ms"], 3),
        "offload_latency_detail": detail,
    }


def _figures(loads: Sequence[SessionLoad]) -> dict[str, float]:
    """Quantiles over all gaps and all first tokens, and sums."""
    tbt_s = [value for load in loads for value in load.tally.tbt_s]
    ttft_s = [value for load in loads for value in load.tally.ttft_s]
    counters = [load.engine.cache.counters for load in loads]
    return {
        "tbt_p50_ms": round(1e3 * quantile(tbt_s, 0.5), 3),
        "tbt_p99_ms": round(1e3 * quantile(tbt_s, 0.99), 3),
        "ttft_p50_ms": round(1e3 * quantile(ttft_s, 0.5), 3),
        "ttft_p95_ms": round(1e3 * quantile(ttft_s, 0.95), 3),
        "requests": len(ttft_s),
        "preemptions": sum(each.preemptions for each in counters),
        "hit_tokens": sum(each.prefix_cache_hits for each in counters),
        "host_hit_tokens": sum(each.host_hit_tokens for each in counters),
        "host_out_mb": round(sum(each.host_out_bytes for each in counters) / 1e6, 1),
        "host_in_mb": round(sum(each.host_in_bytes for each in counters) / 1e6, 1),
        "streamed_mb": round(sum(each.host_streamed_bytes for each in counters) / 1e6, 1),
    }
