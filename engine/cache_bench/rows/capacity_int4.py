"""``capacity_ratio_int4_*``: how many more tokens a pool holds in int4 than in the model's own 16 bits.

The real books fill up with sequences of 2,048 tokens, in chunks of a prompt's, until no more room is found with all
conversions done: once native, once with ``kv_format`` int4, at every block size. *End to end* is whole sequences over
whole sequences, so it pays for the recent window and the last block of every sequence, which stay native, for the
room that a prompt needs before it is converted, ends and free slots of slabs, and the reserve. *Recoded* is the bytes
of one token in native blocks over those of one in the int4 blocks that the run left, with scales and alignment; the
table has the same per slab too, so with the ends of slabs that no whole block fits.

The figures are those of block size 16, the default (quantised blocks then have 32 tokens); every other size is in the
details. Where blocks are large, new tokens go to quarters of them, and up to one of those more stays native in every
sequence.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from engine.cache_bench.context import Context
from engine.cache_manager import CacheManager
from engine.clock import ManualClock
from engine.events import NullSink
from engine.formats import BLOCK_SIZES, NATIVE, class_for
from engine.memory_model import GroupSpec, blocks_per_slab, pool_layout, token_bytes
from engine.request import Request, SamplingParams
from engine.tunables import TUNABLES, default_values

KEYS = ("capacity_ratio_int4_recoded", "capacity_ratio_int4_end_to_end", "capacity_by_block_size")

_POOL_BYTES = 512 << 20
_QUICK_POOL_BYTES = 96 << 20
_SEQUENCE_TOKENS = 2048
_CHUNK_TOKENS = 512
_RECENT_TOKENS = 64


@dataclass(frozen=True)
class Filled:
    """Whole sequences that fit, and bytes per token of sealed blocks of a format, by format."""

    sequences: int
    token_bytes: dict[str, float]


def run(context: Context) -> dict[str, object]:
    """Ratios at the default block size, and a table for all of them."""
    groups = context.load().groups
    if any(group.shape.element_bytes != 2 for group in groups):
        context.skip("needs a model in 16 bits")
    pool_bytes = _QUICK_POOL_BYTES if context.quick else _POOL_BYTES
    native_bytes = sum(token_bytes(group.shape, NATIVE) for group in groups)
    table: dict[str, dict[str, float]] = {}
    for block_size in BLOCK_SIZES:
        native = fill(groups, pool_bytes, "native", block_size)
        int4 = fill(groups, pool_bytes, "int4", block_size)
        table[str(block_size)] = {
            "recoded": round(native_bytes / int4.token_bytes["int4"], 3),
            "recoded_per_slab": round(_per_slab(groups, pool_bytes, block_size), 3),
            "end_to_end": round(int4.sequences / native.sequences, 3),
            "native_sequences": native.sequences,
            "int4_sequences": int4.sequences,
        }
        context.log(f"  blocks of {block_size}: {table[str(block_size)]}")
    default = table[str(TUNABLES["block_size"].default)]
    return {
        "capacity_ratio_int4_recoded": default["recoded"],
        "capacity_ratio_int4_end_to_end": default["end_to_end"],
        "capacity_by_block_size": table,
    }


def fill(
    groups: Sequence[GroupSpec], pool_bytes: int, kv_format: str, block_size: int, *, tokens: int = _SEQUENCE_TOKENS
) -> Filled:
    """Sequences of ``tokens`` until the next one finds no room, everything converted that can be."""
    rng = random.Random(0)
    cache = CacheManager(
        groups,
        pool_bytes,
        {**default_values(), "kv_format": kv_format, "block_size": block_size},
        recent_tokens=_RECENT_TOKENS,
        sinks=16,
        watermark=0.0,
        clock=ManualClock(),
        events=NullSink(),
    )
    sequences = 0
    while True:
        prompt = [rng.randrange(1 << 15) for _ in range(tokens)]
        request = Request(f"fill-{sequences}", prompt, SamplingParams(max_tokens=1), 0)
        if not _prefill(cache, request):
            cache.free(request)
            break
        sequences += 1
    rows = cache.resident()
    formats = {row.kv_format for row in rows}
    return Filled(
        sequences,
        {
            name: sum(row.bytes for row in rows if row.kv_format == name)
            / sum(row.tokens for row in rows if row.kv_format == name)
            for name in formats
        },
    )


def _per_slab(groups: Sequence[GroupSpec], pool_bytes: int, block_size: int) -> float:
    """Tokens of a slab full of int4 blocks over those of one full of native ones."""
    target, slab_tokens = class_for("int4", block_size), pool_layout(groups, pool_bytes).slab_tokens
    blocks = min(blocks_per_slab(group.shape, target, slab_tokens) for group in groups)
    return blocks * target.block_size / slab_tokens


def _prefill(cache: CacheManager, request: Request) -> bool:
    """Compute a prompt chunk by chunk; False when one finds no room even after converting all that is due."""
    while request.num_computed_tokens < len(request.prompt_ids):
        count = min(_CHUNK_TOKENS, len(request.prompt_ids) - request.num_computed_tokens)
        while not cache.allocate(request, count):
            if not _convert(cache):
                return False
        request.num_computed_tokens += count
        cache.commit(request, request.num_computed_tokens)
        _convert(cache)
    return True


def _convert(cache: CacheManager) -> bool:
    """Convert all that is due; whether anything was."""
    done = False
    while batches := cache.plan_recodes(1, sync=True):
        cache.finish_recodes(batches)
        done = True
    return done
