"""Builds what a cache has of every layer group: its pool, one in host memory for a host tier, its recoder. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from engine.arena import Arena
from engine.block_lives import BlockLives
from engine.block_pool import BlockPool
from engine.cache_sequence import CacheSequence, CacheSettings
from engine.memory_model import RESERVE_SLABS, GroupSpec, PoolLayout
from engine.pool_block import HOST
from engine.prefix_cache import PrefixCache
from engine.recoder import Recoder


def build_pools(
    groups: Sequence[GroupSpec],
    layout: PoolLayout,
    host_layout: PoolLayout | None,
    prefix: PrefixCache,
    lives: BlockLives,
) -> list[BlockPool]:
    """Empty pools, which tell ``prefix`` what they give up. ``host_layout``: None for no host tier."""
    pools: list[BlockPool] = []
    for index, group in enumerate(groups):
        arena = Arena(group.shape, layout.num_slabs, layout.slab_bytes[index])
        forget, before = partial(prefix.forget, group=index), partial(prefix.before, group=index)
        host = None
        if host_layout is not None:
            host_arena = Arena(group.shape, host_layout.num_slabs, host_layout.slab_bytes[index])
            host = BlockPool(host_arena, forget, reserve_slabs=0, before=before, lives=lives, tier=HOST)
        pools.append(BlockPool(arena, forget, reserve_slabs=RESERVE_SLABS, before=before, lives=lives, host=host))
    return pools


def build_recoders(
    groups: Sequence[GroupSpec],
    pools: Sequence[BlockPool],
    prefix: PrefixCache,
    sequences: Mapping[int, CacheSequence],
    settings: CacheSettings,
    recent_tokens: int,
) -> list[Recoder]:
    """One per pool. ``sequences`` by serial stay the caller's."""
    return [
        Recoder(index, pool, prefix, sequences, settings, recent_tokens=recent_tokens, lossiest=group.lossiest)
        for index, (group, pool) in enumerate(zip(groups, pools, strict=True))
    ]
