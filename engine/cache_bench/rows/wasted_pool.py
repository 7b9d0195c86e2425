"""``wasted_pool_pct``: bytes of allocated storage that hold no token, over the pool's bytes, by block size.

Real scheduler and cache, no model: requests with a trace's lengths (or stated lognormal ones) run in a pool that is
kept full, more always waiting; finished ones stay as idle prefix blocks, as they do in service. The pool is looked at
every few steps once it has been full for a while. Counted as waste: tails of blocks, free slots between blocks of a
slab, ends of slabs, alignment (see :class:`engine.cache_bench.storage.StorageUse`). Slabs that belong to no class are
not allocated, the reserve among them; how much that is stands in the details. Per block size the worse of native and
int4 (which adds a second class of blocks) counts, the mean over the looks. The idea of the figure is vLLM's (Kwon et
al. 2023), which reports under 4 % for paged storage.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import fmean

from engine.cache_bench.context import Context
from engine.cache_bench.dry_run import DryEngine
from engine.cache_bench.lengths import Lengths, load_lengths
from engine.cache_bench.storage import StorageUse, storage_use
from engine.formats import BLOCK_SIZES
from engine.memory_model import GroupSpec

KEYS = ("wasted_pool_pct", "wasted_pool_detail")

_POOL_BYTES = 256 << 20
_LONGEST = 4096
_WAITING = 16
_RECODE_TOKENS = 512
_EVERY = 10  # steps between looks


def run(context: Context) -> dict[str, object]:
    """Percent by block size, and by format where it goes."""
    groups = context.load().groups
    lengths = load_lengths(context.traces, 2000, random.Random(context.seed), longest=_LONGEST)
    worst: dict[str, float] = {}
    detail: dict[str, object] = {"lengths": lengths.source, "pool_bytes": _POOL_BYTES}
    for block_size in BLOCK_SIZES:
        for kv_format in ("native", "int4"):
            looks = look_at(
                groups,
                lengths,
                {"block_size": block_size, "kv_format": kv_format, "max_num_seqs": 256, "max_num_batched_tokens": 2048},
                looks=6 if context.quick else 40,
                seed=context.seed,
            )
            wasted = fmean(look.wasted_pct for look in looks)
            worst[str(block_size)] = round(max(worst.get(str(block_size), 0.0), wasted), 2)
            detail[f"{kv_format} {block_size}"] = _summary(looks)
            context.log(f"  {kv_format} in blocks of {block_size}: {detail[f'{kv_format} {block_size}']}")
    return {"wasted_pool_pct": worst, "wasted_pool_detail": detail}


def look_at(
    groups: Sequence[GroupSpec],
    lengths: Lengths,
    values: dict[str, str | int],
    *,
    looks: int,
    seed: int,
    pool_bytes: int = _POOL_BYTES,
) -> list[StorageUse]:
    """Keep a pool full and look at it; the first look is once requests have ended as often as the pool holds them."""
    engine = DryEngine(
        groups, pool_bytes, values, random.Random(seed), max_model_len=_LONGEST, recode_tokens=_RECODE_TOKENS
    )
    todo = iter(lengths.pairs * 100)
    found: list[StorageUse] = []
    completed, warm_after, steps = engine.scheduler.counters, 0, 0
    while len(found) < looks:
        while engine.scheduler.num_waiting < _WAITING:
            engine.add(*next(todo))
        engine.step()
        steps += 1
        warm_after = max(warm_after, len(engine.scheduler.running))
        if completed.requests_completed >= warm_after and steps % _EVERY == 0:
            found.append(storage_use(engine.cache))
    return found


def _summary(looks: Sequence[StorageUse]) -> dict[str, float]:
    parts = {
        name: round(fmean(100 * getattr(look, name) / look.pool for look in looks), 2)
        for name in ("wasted", "tails", "free_slots", "slack", "free")
    }
    return {**parts, "worst_look": round(max(look.wasted_pct for look in looks), 2)}
