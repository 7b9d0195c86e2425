"""Whether the cache's books agree with each other: recounted from the ground up, for tests and audits. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from engine.arena import IntegrityError
from engine.block_pool import BlockPool
from engine.cache_sequence import CacheSequence
from engine.chunks import chunk_mask
from engine.formats import CHUNK_TOKENS, OFFSET_UNIT, BlockClass, lossiness_of
from engine.memory_model import GroupSpec
from engine.pool_block import DEVICE, HOST, Block
from engine.prefix_cache import PrefixCache
from engine.recode_unit import RecodeUnit


def check_pool(pool: BlockPool) -> None:
    """Raises IntegrityError unless every block is in exactly one state and every count is right."""
    arena = pool.arena
    used = arena.check_integrity()
    counts: dict[BlockClass, int] = {}
    idle: dict[BlockClass, int] = {}
    slab_idle = [0] * arena.num_slabs
    tokens: dict[BlockClass, int] = {}
    stale_bytes = idle_bytes = resident = 0
    for offset, block in pool.blocks.items():
        size = arena.block_bytes(block.block_class)
        counts[block.block_class] = counts.get(block.block_class, 0) + 1
        tokens[block.block_class] = tokens.get(block.block_class, 0) + block.filled
        resident += size
        slab = arena.slab_of(offset)
        _check_block(pool, offset, block)
        if _is_nobodys(block):
            idle[block.block_class] = idle.get(block.block_class, 0) + 1
            slab_idle[slab] += 1
            idle_bytes += size
        stale_bytes += size * block.is_stale
    _require(counts == used == pool.class_counts, f"blocks {counts}, slabs {used}, counted {pool.class_counts}")
    kept = {kind: count for kind, count in pool.class_tokens.items() if count}
    found_tokens = {kind: count for kind, count in tokens.items() if count}
    _require(kept == found_tokens, f"tokens by class: found {found_tokens}, counted {kept}")
    whole = {slab for slab, count in enumerate(slab_idle) if count and count == arena.slab_used(slab)}
    found, counted = (slab_idle, idle, whole), pool.idle.counts()
    _require(found == counted, f"idle by slab, by class and whole slabs: found {found}, counted {counted}")
    _require(sum(map(len, pool.stale.by_slab.values())) == sum(b.is_stale for b in pool.blocks.values()), "stale list")
    total = arena.num_slabs * arena.slab_units * OFFSET_UNIT
    held = resident - pool.idle.num_bytes
    _require(held >= 0 and pool.idle.num_bytes >= 0 and resident <= total, f"{held} held, {resident} of {total} used")
    _check_unshadowed(pool)
    pool.idle.check_integrity()
    found_bytes = (resident, idle_bytes, stale_bytes)
    counted_bytes = (pool.resident_bytes, pool.idle.num_bytes, pool.stale.num_bytes)
    _require(found_bytes == counted_bytes, f"resident, idle, stale bytes {found_bytes}, counted {counted_bytes}")


def _check_block(pool: BlockPool, offset: int, block: Block) -> None:
    slab = pool.arena.slab_of(offset)
    _require(block.offset == offset, f"block {block.offset} is listed at {offset}")
    _require(pool.arena.slab_class(slab) == block.block_class, f"block {offset} is not of its slab's class")
    _require(block.first % block.size == 0, f"block {offset} of {block.size} starts at {block.first}")
    _require(0 <= block.filled <= block.size, f"block {offset} of {block.size} has {block.filled} tokens")
    _require((block in pool.idle) == _is_nobodys(block), f"block {offset}: idle list is wrong")
    is_shadow = block.tier == HOST and block.twin is not None
    _require(not _is_nobodys(block) or bool(block.nodes) or is_shadow, f"block {offset} is nobody's and not freed")
    _require(block.tier == pool.tier, f"block {offset} of tier {block.tier} is in the pool of tier {pool.tier}")
    _check_twin(block)
    _require(block.is_stale == (offset in pool.stale.by_slab.get(slab, {})), f"block {offset}: stale list is wrong")
    for position in block.nodes:
        inside = block.first <= position and position + CHUNK_TOKENS <= block.first + block.filled
        _require(inside, f"block {offset} is cached for {position} but holds {block.first}+{block.filled}")


def _check_twin(block: Block) -> None:
    twin = block.twin
    if twin is None:
        return
    same = (twin.block_class, twin.first, twin.filled) == (block.block_class, block.first, block.filled)
    _require(twin.twin is block and twin.tier != block.tier and same, f"block {block.offset}: twin {twin}")
    _require(block.tier == DEVICE or not (block.holders or block.nodes), f"shadow {block.offset} has names")
    _require(block.tier == DEVICE or not block.is_pinned, f"shadow {block.offset} is pinned")


def _check_unshadowed(pool: BlockPool) -> None:
    size = sum(pool.arena.block_bytes(block.block_class) for block in pool.unshadowed.values())
    _require(size == pool.unshadowed_bytes, f"{pool.unshadowed_bytes} bytes without shadow counted, {size} found")
    for block in pool.unshadowed.values():
        _require(block in pool.idle and block.twin is None, f"block {block.offset} should have no shadow")
    if pool.host is not None:
        shadows = sum(block.twin is not None for block in pool.host.blocks.values())
        found = sum(block.twin is not None for block in pool.blocks.values())
        _require(shadows == found == pool.host.num_shadows(), f"{found} twins, {shadows} shadows")


def _is_nobodys(block: Block) -> bool:
    return not block.holders and not block.is_pinned


def check_group(
    group: int,
    spec: GroupSpec,
    pool: BlockPool,
    sequences: Sequence[CacheSequence],
    prefix: PrefixCache,
    units: Sequence[RecodeUnit],
    pinned: AbstractSet[tuple[int, int]],
) -> None:
    """Raises IntegrityError unless tables, holders, the prefix cache, and conversions and copies under way name the
    same blocks. ``pinned``: (tier, offset) of what is being copied.
    """
    tiers = [pool] if pool.host is None else [pool, pool.host]
    holders: dict[tuple[int, int], set[int]] = {}
    for sequence in sequences:
        for block in _check_table(group, spec, tiers, sequence):
            holders.setdefault((block.tier, block.offset), set()).add(sequence.serial)
    in_recode = {(block.tier, block.offset) for unit in units for block in (*unit.sources, *unit.targets)}
    protected = lossiness_of(spec.lossiest)
    for tier in tiers:
        check_pool(tier)
        for offset, block in tier.blocks.items():
            place = (block.tier, offset)
            _require(block.block_class.lossiness <= protected, f"block {place} of {spec.name} is {block.block_class}")
            found = holders.get(place, set())
            _require(set(block.holders) == found, f"block {place}: holders {set(block.holders)} != {found}")
            _require(block.in_recode == (place in in_recode), f"block {place}: in recode {block.in_recode}")
            _require(block.in_transfer == (place in pinned), f"block {place}: in transfer {block.in_transfer}")
            for node in block.nodes.values():
                _require(prefix.nodes[node].blocks[group] is block, f"block {place} thinks that node {node} names it")


def _check_table(group: int, spec: GroupSpec, tiers: Sequence[BlockPool], sequence: CacheSequence) -> list[Block]:
    table, who = sequence.tables[group], sequence.request_id
    most = min(sequence.max_lossiness, lossiness_of(spec.lossiest))
    position = 0
    for block, stop in zip(table.blocks, table.stops, strict=True):
        is_there = tiers[block.tier].blocks.get(block.offset) is block
        _require(is_there, f"{who} holds block {block.offset} of tier {block.tier}, which is free")
        fits = position <= block.first < stop <= block.end and stop % CHUNK_TOKENS == 0
        _require(fits, f"{who}: entry {block.first}..{stop} after {position}")
        position = stop
    held = sum(chunk_mask(block.first, stop) for block, stop in zip(table.blocks, table.stops, strict=True))
    _require(not table.hidden & ~held, f"{who}: chunks {table.hidden & ~held:b} are hidden but not held")
    _require(not table.hidden & ~sequence.dropped[group], f"{who}: chunks are hidden that eviction did not drop")
    for index, block in enumerate(table.blocks):
        _require(bool(table.kept(index)), f"{who} holds block {block.offset} but keeps nothing of it")
        _require(block.block_class.lossiness <= most, f"{who}: block {block.offset} is {block.block_class.kv_format}")
    # With a window of 1 the next token attends itself alone, and a pin has nothing to hold.
    holds_all = sequence.end <= position or (sequence.is_pin and spec.window == 1)
    in_order = sequence.committed <= sequence.end and holds_all
    _require(in_order, f"{who}: {sequence.committed} computed, {sequence.end} used, {position} allocated")
    return table.blocks


def check_sequences(
    by_serial: Mapping[int, CacheSequence], by_request: Mapping[str, CacheSequence], prefix: PrefixCache
) -> None:
    """Raises IntegrityError unless both indices hold the same sequences and the prefix cache counts them."""
    prefix.check_integrity([sequence.node for sequence in by_serial.values() if sequence.node])
    requests = {sequence.request_id: sequence for sequence in by_serial.values() if not sequence.is_pin}
    same = requests == dict(by_request)
    _require(same, "sequences by serial and by request differ")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise IntegrityError(message)
