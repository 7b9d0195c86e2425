"""``offload_gain``: throughput with a host tier over that without, at 1, 8 and 32 clients, and where it crosses 1.

The pool is the same for all: it holds ten conversations at their end. Each client goes through two sessions of its own,
turn by turn, without think time. One client finds all it needs on the device, and the tier can only cost; with eight
finished turns are pushed out; with thirty-two running sequences are, too. ``offload_crossover``: the number of clients
from which on the gain is at least 1.02, between the measured ones in proportion (on a logarithmic scale); null where it
never is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from engine.cache_bench.context import Context
from engine.cache_bench.rows.offload_latency import emulated_link
from engine.cache_bench.sessions import SessionLoad, SessionShape, quantile, run_together, warm_up

KEYS = ("offload_gain", "offload_crossover", "offload_gain_detail")

_CLIENTS = (1, 8, 32)
_QUICK_CLIENTS = (1, 8)
_CONVERSATIONS = 10  # that the pool holds
_WORTH = 1.02


def run(context: Context) -> dict[str, object]:
    """Gain by number of clients, the crossover, and what happened in each run."""
    if context.device != "cpu":
        context.skip("the link is emulated: on a GPU it would be measured")
    link = emulated_link(context)
    warm_up(context.load())
    gains: dict[int, float] = {}
    rate = round(link.in_bytes_per_s)
    detail: dict[str, object] = {"link_bytes_per_s": rate, "link": "emulated", "seed": context.seed}
    for clients in _QUICK_CLIENTS if context.quick else _CLIENTS:
        shape = SessionShape(
            num_sessions=2 * clients if clients > 1 else 6,
            turns=4,
            first_tokens=400,
            turn_tokens=40,
            output_tokens=40,
            think_s=0.0,
            clients=clients,
        )
        pool = _CONVERSATIONS * shape.final_tokens
        without = SessionLoad(context.load(), shape, pool, seed=context.seed)
        host = 4 * shape.num_sessions * shape.final_tokens
        tier = SessionLoad(
            context.load(), shape, pool, seed=context.seed, host_tokens=host, link=link, staging_tokens=pool // 16
        )
        run_together([without, tier])
        rates = [load.tally.output_tokens / load.clock.now_ns() * 1e9 for load in (without, tier)]
        gains[clients] = rates[1] / rates[0]
        detail[str(clients)] = {"without": _figures(without, rates[0]), "tier": _figures(tier, rates[1])}
        context.log(f"  {clients} clients: gain {gains[clients]:.3f}, {detail[str(clients)]}")
    return {
        "offload_gain": {str(clients): round(gain, 3) for clients, gain in gains.items()},
        "offload_crossover": crossover(gains),
        "offload_gain_detail": detail,
    }


def crossover(gains: Mapping[int, float], worth: float = _WORTH) -> float | None:
    """Clients at which the gain reaches ``worth``, interpolated over the logarithm of their number."""
    below: tuple[int, float] | None = None
    for clients, gain in sorted(gains.items()):
        if gain >= worth:
            if below is None:
                return float(clients)
            share = (worth - below[1]) / (gain - below[1])
            return round(math.exp(math.log(below[0]) + share * (math.log(clients) - math.log(below[0]))), 1)
        below = (clients, gain)
    return None


def _figures(load: SessionLoad, rate: float) -> dict[str, float]:
    counters, tally = load.engine.cache.counters, load.tally
    return {
        "output_tokens_per_s": round(rate, 1),
        "ttft_p90_ms": round(1e3 * quantile(tally.ttft_s, 0.9), 1),
        "tbt_p50_ms": round(1e3 * quantile(tally.tbt_s, 0.5), 2),
        "prefill_tokens": tally.prefill_tokens,
        "preemptions": counters.preemptions,
        "swapped_out": counters.swapped_out,
        "recomputed_tokens": counters.recomputed_tokens,
        "host_hit_tokens": counters.host_hit_tokens,
        "streamed_mb": round(counters.host_streamed_bytes / 1e6, 1),
        "waited_s": round(tally.waited_s, 3),
    }
