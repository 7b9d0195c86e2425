"""Prefix hits on Mooncake's conversation trace at 10,000 blocks, by policy, and against an independent LRU count.

The trace names blocks of 512 tokens by ids: equal ids are equal prefixes. Each is replayed as one block of 64 tokens
through the cache manager itself: match, allocate, commit, free, one request at a time in the order of the trace. So the
pool's slabs, idle blocks, chain of chunks and policies are those that serve, at an eighth of the length; hits count in
blocks. The last block of a prompt counts as a whole one, though the trace does not say how full it is.
"""

from __future__ import annotations

import csv
import gzip
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from engine.cache_bench.context import Context
from engine.cache_manager import CacheManager
from engine.clock import ManualClock
from engine.events import NullSink
from engine.formats import CHUNK_TOKENS, NATIVE, KVShape
from engine.memory_model import RESERVE_SLABS, GroupSpec, slab_bytes
from engine.prefix_policy import parity_tokens
from engine.request import Request, SamplingParams
from engine.transfers import HostLink
from engine.tunables import TUNABLES, default_values

TRACE = "mooncake_conversation_train.csv.gz"
NUM_BLOCKS = 10_000
KEYS = ("lru_hit_ratio", "best_policy_hit_ratio", "best_policy", "hit_ratio_by_policy")

_TRACE_BLOCK, _BLOCK, _SLAB = 512, 64, 1024  # tokens
_PARITY_TOKENS = parity_tokens(4096) * _BLOCK // _TRACE_BLOCK  # of a model of that width, at the replay's scale
_SHAPE = KVShape(num_layers=1, num_kv_heads=1, head_dim=8, element_bytes=2)

Chain = tuple[int, ...]


def run(context: Context) -> dict[str, object]:
    path = context.need_traces() / TRACE
    if not path.exists():
        context.skip(f"needs {TRACE}")
    rows = read_trace(path)[: 1000 if context.quick else None]
    counted = count_lru([chain for _, chain in rows], NUM_BLOCKS)
    figures: dict[str, dict[str, float]] = {}
    for policy in map(str, TUNABLES["prefix_eviction"].values):
        hits = replay(rows, policy)
        if policy == "lru" and hits != counted:
            at = next(i for i, pair in enumerate(zip(hits, counted, strict=True)) if pair[0] != pair[1])
            raise AssertionError(f"request {at}: the cache hits {hits[at]} blocks, an LRU count {counted[at]}")
        figures[policy] = _ratios([chain for _, chain in rows], hits)
        context.log(f"  {policy}: {figures[policy]}")
    best = max((name for name in figures if name != "lru"), key=lambda name: figures[name]["whole"])
    return {
        "lru_hit_ratio": figures["lru"]["whole"],
        "best_policy_hit_ratio": figures[best]["whole"],
        "best_policy": best,
        "hit_ratio_by_policy": figures,
    }


def read_trace(path: Path) -> list[tuple[float, Chain]]:
    """(arrival in seconds, ids of the prompt's blocks) per request, in the trace's order."""
    with gzip.open(path, "rt", newline="") as file:
        rows = csv.DictReader(file)
        return [(float(r["arrival_s"]), tuple(map(int, r["hash_ids_b512"].split()))) for r in rows]


def count_lru(chains: Sequence[Chain], num_blocks: int) -> list[int]:
    """Leading blocks of each chain found in a least-recently-used cache; the end of a chain counts as older."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = []
    for chain in chains:
        found = 0
        while found < len(chain) and chain[found] in cache:
            found += 1
        hits.append(found)
        for block in reversed(chain):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > num_blocks:
            cache.popitem(last=False)
    return hits


def replay(
    rows: Sequence[tuple[float, Chain]], policy: str, num_blocks: int = NUM_BLOCKS, *, host_blocks: int = 0
) -> list[int]:
    """Blocks of each request that the cache manager finds, with room for ``num_blocks`` (a multiple of 16), and for
    ``host_blocks`` more in host memory, over a link that has always done its work before the next request comes.
    """
    clock = ManualClock()
    slabs = num_blocks * _BLOCK // _SLAB + RESERVE_SLABS
    values = default_values() | {"block_size": _BLOCK, "prefix_eviction": policy}
    values |= {"host_offload": "on" if host_blocks else "off"}
    cache = CacheManager(
        [GroupSpec("all", (0,), _SHAPE)],
        slabs * slab_bytes(_SHAPE, _SLAB),
        values,
        recent_tokens=0,
        sinks=0,
        watermark=0.0,
        clock=clock,
        events=NullSink(),
        parity_tokens=_PARITY_TOKENS,
        host_pool_bytes=host_blocks * _BLOCK // _SLAB * slab_bytes(_SHAPE, _SLAB),
        link=HostLink(1e12, 1e12),
    )
    blocks = sum(cache.layout.slab_tokens for _ in range(cache.layout.num_slabs - RESERVE_SLABS)) // _BLOCK
    if blocks != num_blocks or NATIVE.tile_tokens != CHUNK_TOKENS:
        raise AssertionError(f"the pool holds {blocks} blocks, not {num_blocks}")
    hits = []
    for number, (arrival_s, chain) in enumerate(rows):
        clock.advance_s(max(0.0, arrival_s - clock.now_ns() / 1e9))
        # One token more, since the last one of a prompt is never a hit; it is not computed.
        ids = [token for block in chain for token in (block, *[0] * (_BLOCK - 1))] + [0]
        request = Request(str(number), ids, SamplingParams(max_tokens=1), clock.now_ns())
        request.num_computed_tokens = cache.match_prefix(request)
        if cache.needs_load(request):
            if cache.begin_load(request):
                _copy_all(cache)
                cache.end_load(request)
            else:
                cache.free(request)
                request.num_computed_tokens = cache.match_prefix(request, on_device=True)
        hits.append(request.num_computed_tokens // _BLOCK)
        if not cache.allocate(request, len(chain) * _BLOCK - request.num_computed_tokens):
            raise AssertionError(f"request {number} of {len(chain)} blocks finds no room")
        cache.commit(request, len(chain) * _BLOCK)
        cache.free(request)
        _copy_all(cache)
    return hits


def _copy_all(cache: CacheManager) -> None:
    while cache.has_transfer_plans():
        planned = cache.plan_transfers()
        if not planned:
            return
        cache.finish_transfers(transfer.number for transfer in planned)


def _ratios(chains: Sequence[Chain], hits: Sequence[int]) -> dict[str, float]:
    """Hit blocks over all blocks, of the whole trace and of its halves; the share of prefill work saved as well."""
    half = len(chains) // 2
    parts = {"whole": slice(None), "first_half": slice(half), "second_half": slice(half, None)}
    ratios = {}
    for name, part in parts.items():
        ratios[name] = round(sum(hits[part]) / sum(map(len, chains[part])), 4)
    ratios["work_saved"] = round(sum(map(_work, hits)) / sum(_work(len(chain)) for chain in chains), 4)
    return ratios


def _work(num_blocks: int) -> float:
    """Prefill work of the first blocks of a prompt, in blocks without attention (see prefix_policy.Cost)."""
    return num_blocks * (1 + num_blocks * _BLOCK / 2 / _PARITY_TOKENS)
