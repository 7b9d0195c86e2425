"""How much of a pool that is kept full holds tokens, and where the rest is. ``python -m envs.bench_usage``; the last
line is JSON.

A catalogue workload's lengths, arriving at an even rate that no setting serves, in a simulated engine without prefix
hits. The pool is looked at once a second: bytes of tokens that requests hold, tails of their blocks, cached blocks,
free slots of slabs that are cut (of the native blocks that new tokens go to, and of all others), and free slabs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Final

from engine.formats import NATIVE, BlockClass
from engine.tunables import TunableValue
from envs.arrivals_feed import StreamFeed
from envs.bench_context import PROFILES
from envs.ledger import Ledger
from envs.profile import Profile, read_profile
from envs.signals import Targets
from envs.simulator import SimOptions, Simulator
from envs.workload.arrivals import Envelope
from envs.workload.catalogue import CATALOGUE
from envs.workload.generators import stream

FORMATS: Final = ("native", "int8", "k8v4", "int4")
SIZES: Final = (16, 64, 256)
WORKLOADS: Final = ("chat-steady", "reasoning-bursty")
_RATE_RPS: Final = 6.0  # beyond what any setting serves
_WARM_UP_S: Final = 120


def measure(
    profile: Profile,
    workload: str,
    values: Mapping[str, TunableValue],
    duration_s: int,
    seed: int,
    recode_tokens: int = SimOptions.recode_budget_tokens,
) -> dict[str, float]:
    """Means over the run, as shares of the pool, and what was served. ``used_blocked``: of the looks at which the head
    of the queue waited for room, not for its turn to compute.
    """
    plain = replace(CATALOGUE[workload], rate=Envelope.constant(_RATE_RPS, 1e6), gap_cv=1.0)
    feed = StreamFeed(partial(stream, plain, duration_s=1e6, seed=seed))
    options = SimOptions(
        profile.pool_bytes,
        profile.model.max_model_len,
        values={"max_num_seqs": 256, **values},
        prefix_cache=False,
        recode_budget_tokens=recode_tokens,
        max_waiting=64,
    )
    simulator = Simulator(profile.groups(), profile.latency_model(), options, feed, ledger=Ledger(Targets()))
    simulator.run_until(_WARM_UP_S * 10**9)
    before = replace(simulator.stats().counters)
    looks: list[dict[str, float]] = []
    for second in range(1, duration_s + 1):
        simulator.run_until((_WARM_UP_S + second) * 10**9)
        looks.append(look(simulator))
    after = simulator.stats().counters
    blocked = [one["used"] for one in looks if one["blocked"]]
    return {
        **{name: fmean(one[name] for one in looks) for name in looks[0]},
        "used_blocked": fmean(blocked) if blocked else float("nan"),
        "served_rps": (after.requests_completed - before.requests_completed) / duration_s,
        "preemptions": float(after.preemptions - before.preemptions),
        "recoded_per_token": (after.recoded_tokens - before.recoded_tokens)
        / max(1, after.prompt_tokens + after.generation_tokens - before.prompt_tokens - before.generation_tokens),
    }


def look(simulator: Simulator) -> dict[str, float]:
    """Where the bytes of the first layer group's pool are now, as shares, and what the head of the queue lacks."""
    pool, recoder = simulator.cache._pools[0], simulator.cache._recoders[0]  # noqa: SLF001
    arena, total = pool.arena, simulator.cache.layout.arena_bytes(0)
    tokens = tails = idle = moving = 0.0
    for block in pool.blocks.values():
        size = arena.block_bytes(block.block_class)
        if block in pool.idle:
            idle += size
        elif block.holders:
            tokens += size * block.filled / block.size
            tails += size * (1 - block.filled / block.size)
        else:
            moving += size
    written = BlockClass(NATIVE.name, recoder.targets.write_size())
    free: Counter[bool] = Counter()
    for block_class in pool.class_counts:
        free[block_class == written] += arena.free_slots(block_class) * arena.block_bytes(block_class)
    queues = simulator.scheduler._queues  # noqa: SLF001
    head = queues.head()
    capacity = simulator.cache.max_sequence_tokens()
    active = sum(simulator.cache.missing_tokens(other) for other in queues.running)
    return {
        "used": tokens / total,
        "tails": tails / total,
        "idle": idle / total,
        "moving": moving / total,
        "free_native": free[True] / total,
        "free_other": free[False] / total,
        "free_slabs": arena.num_free_slabs / arena.num_slabs,
        "stale": pool.stale.num_bytes / total,
        "head": simulator.cache.missing_tokens(head) / capacity if head is not None else 0.0,
        "active_lacks": active / capacity,
        "room": simulator.cache.room_tokens() / capacity,
        "running": float(len(queues.running)),
        "blocked": float(queues.blocked_at is not None),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry of the command line."""
    parser = argparse.ArgumentParser(prog="python -m envs.bench_usage", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--profile", type=Path, default=PROFILES / "llama3_8b_l4_estimated.yaml")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="comma separated (%(default)s)")
    parser.add_argument("--formats", default=",".join(FORMATS), help="comma separated (%(default)s)")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="of blocks, comma separated (%(default)s)")
    parser.add_argument("--batched", type=int, default=512, help="max_num_batched_tokens (%(default)s)")
    parser.add_argument(
        "--recode-tokens", type=int, default=SimOptions.recode_budget_tokens, help="per step (%(default)s)"
    )
    parser.add_argument("--seconds", type=int, default=300, help="simulated, after a warm-up (%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args(arguments)
    profile, rows = read_profile(chosen.profile), []
    for workload in chosen.workloads.split(","):
        for kv_format in chosen.formats.split(","):
            for size in map(int, chosen.sizes.split(",")):
                values: dict[str, TunableValue] = {
                    "kv_format": kv_format, "block_size": size, "max_num_batched_tokens": chosen.batched,
                }  # fmt: skip
                found = measure(profile, workload, values, chosen.seconds, chosen.seed, chosen.recode_tokens)
                rows.append({"workload": workload, **values, **found})
                figures = "  ".join(f"{name} {figure:.3g}" for name, figure in found.items())
                print(f"{workload:18}{kv_format:>7}{size:>4}  {figures}", flush=True)
    print(json.dumps({"bench": "usage", "profile": chosen.profile.stem, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
