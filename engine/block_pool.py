"""The blocks of one layer group: who holds them, which are only cached, which wait for another class. No torch.

A block is in exactly one state: *held* (by sequences' block tables), *idle* (nobody holds it, the prefix cache can
still hit it; given up least recently used first when room is needed), or *in recode* with neither (its storage waits
for a conversion to end). A block that is none of these is free and not here at all.

Requests do not get the last ``reserve_slabs`` free slabs: conversions need somewhere to write before they free
anything. Only a sequence that is alone may have them, so that it always ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from engine.arena import Arena, IntegrityError
from engine.formats import BLOCK_SIZES, CHUNK_TOKENS, NATIVE, OFFSET_UNIT, BlockClass


@dataclass(slots=True, eq=False)
class Block:
    """One block. ``filled``: tokens whose KV is committed, in whole chunks or to the end of its writer.

    ``holders``: ids of sequences whose table has it. ``nodes``: prefix-cache node by absolute chunk position.
    """

    offset: int
    block_class: BlockClass
    first: int
    filled: int = 0
    holders: dict[int, None] = field(default_factory=dict)
    nodes: dict[int, int] = field(default_factory=dict)
    last_used: int = 0
    in_recode: bool = False
    is_stale: bool = False

    @property
    def size(self) -> int:
        return self.block_class.block_size

    @property
    def end(self) -> int:
        return self.first + self.block_class.block_size

    @property
    def is_sealed(self) -> bool:
        """Full: its bytes never change again."""
        return self.filled >= self.block_class.block_size


class BlockPool:
    """Allocates, shares, caches and frees the blocks of one group.

    ``forget(block)`` is called before an idle block is given up, to take it out of the prefix cache.
    """

    def __init__(self, arena: Arena, forget: Callable[[Block], None], *, reserve_slabs: int = 1) -> None:
        self.arena = arena
        self.reserve_slabs = reserve_slabs
        self.blocks: dict[int, Block] = {}
        self.idle: dict[int, Block] = {}  # least recently used first, unless _idle_unsorted
        self.stale: dict[int, dict[int, Block]] = {}  # slab -> offset -> block not in the class it should have
        self.class_counts: dict[BlockClass, int] = {}
        self.resident_bytes = 0
        self.idle_bytes = 0
        self.stale_bytes = 0
        self.version = 0  # grows whenever room may have appeared
        self.dropped_idle = 0  # cumulative blocks given up for room
        self._forget = forget
        self._clock = 0
        self._idle_unsorted = False
        self._slab_idle = [0] * arena.num_slabs
        self._class_idle: dict[BlockClass, int] = {}
        self._whole: dict[int, tuple[BlockClass, int]] = {}  # slabs in which every used block is idle -> how many
        self._whole_blocks: dict[BlockClass, int] = {}
        self._whole_slabs: dict[BlockClass, int] = {}

    # -- room -----------------------------------------------------------------------------------------------------

    def plan_blocks(self, start: int, stop: int, block_size: int, *, keep_slabs: int) -> list[int] | None:
        """Sizes of native blocks that cover ``start .. stop``, or None without room for them.

        At each position the largest size up to ``block_size`` that divides it and has room; when the pool has no slab
        left to cut, then smaller ones, then larger ones, out of slabs that are cut already.
        """
        primary = BlockClass(NATIVE.name, block_size)
        slots = {block_size: self.arena.free_slots(primary) + self._class_idle.get(primary, 0)}
        slabs = self._spare_slabs(primary, keep_slabs)
        sizes: list[int] = []
        position = start
        while position < stop:
            for size in _sizes_at(position, block_size):
                room = slots.get(size)
                if room is None:
                    other = BlockClass(NATIVE.name, size)
                    idle = self._class_idle.get(other, 0) - self._whole_blocks.get(other, 0)
                    room = self.arena.free_slots(other) + idle
                if not room and slabs:
                    slabs -= 1
                    room = self.arena.per_slab(BlockClass(NATIVE.name, size))
                slots[size] = room
                if room:
                    slots[size] = room - 1
                    sizes.append(size)
                    position += size
                    break
            else:
                return None
        return sizes

    def available_tokens(self, block_size: int) -> int:
        """Native tokens that new blocks up to ``block_size`` could hold now, idle cached blocks given up."""
        block_class = BlockClass(NATIVE.name, block_size)
        blocks = self.arena.free_slots(block_class) + self._class_idle.get(block_class, 0)
        tokens = (
            blocks + self._spare_slabs(block_class, self.reserve_slabs) * self.arena.per_slab(block_class)
        ) * block_size
        for size in BLOCK_SIZES[: BLOCK_SIZES.index(block_size)]:
            tokens += self.arena.free_slots(BlockClass(NATIVE.name, size)) * size
        return tokens

    def _spare_slabs(self, block_class: BlockClass, keep_slabs: int) -> int:
        """Slabs that could be cut for a class, besides those whose blocks are of that class already."""
        whole = len(self._whole) - self._whole_slabs.get(block_class, 0)
        return max(0, self.arena.num_free_slabs + whole - keep_slabs)

    # -- life of a block ------------------------------------------------------------------------------------------

    def take(self, block_class: BlockClass, first: int, *, keep_slabs: int, avoid_slab: int = -1) -> Block | None:
        """A fresh block without holders, giving up idle ones if need be; None when that does not help.

        ``keep_slabs``: how many slabs must stay free.
        """
        while True:
            offset = self.arena.allocate(block_class, keep_slabs=keep_slabs, avoid_slab=avoid_slab)
            if offset is not None:
                break
            if not self._reclaim(block_class, avoid_slab):
                return None
        block = self.blocks[offset] = Block(offset, block_class, first)
        self.class_counts[block_class] = self.class_counts.get(block_class, 0) + 1
        self.resident_bytes += self.arena.block_bytes(block_class)
        if self._slab_idle[offset // self.arena.slab_units]:
            self._recount(offset // self.arena.slab_units)
        return block

    def hold(self, block: Block, sequence: int) -> None:
        """A sequence's table takes the block up."""
        block.holders[sequence] = None
        if block.offset in self.idle:
            self._remove_idle(block)

    def drop(self, block: Block, sequence: int) -> None:
        """A sequence's table lets go of the block."""
        if sequence not in block.holders:
            raise IntegrityError(f"sequence {sequence} does not hold block {block.offset}")
        del block.holders[sequence]
        self._clock += 1
        block.last_used = self._clock
        self.settle(block)

    def settle(self, block: Block) -> None:
        """Put a block where it belongs after its holders, nodes or recode state changed: held, idle, or freed."""
        if block.holders or block.in_recode:
            if block.offset in self.idle:
                self._remove_idle(block)
        elif block.nodes:
            if block.offset not in self.idle:
                self._add_idle(block)
        else:
            self._free(block)

    def adopt_age(self, block: Block, sources: Sequence[Block]) -> None:
        """A converted block is as recently used as the sources it replaces."""
        block.last_used = max(source.last_used for source in sources)
        self._idle_unsorted = True

    def drop_all_idle(self) -> None:
        """Give up the whole prefix cache that nobody holds."""
        for block in list(self.idle.values()):
            self._give_up(block)

    def _free(self, block: Block) -> None:
        if block.offset in self.idle:
            self._remove_idle(block)
        self.unmark_stale(block)
        del self.blocks[block.offset]
        count = self.class_counts[block.block_class] - 1
        if count:
            self.class_counts[block.block_class] = count
        else:
            del self.class_counts[block.block_class]
        self.resident_bytes -= self.arena.block_bytes(block.block_class)
        self.arena.free(block.offset)
        self.version += 1
        slab = block.offset // self.arena.slab_units
        if self._slab_idle[slab] or slab in self._whole:
            self._recount(slab)

    # -- idle blocks ----------------------------------------------------------------------------------------------

    def _add_idle(self, block: Block) -> None:
        self.idle[block.offset] = block
        self.version += 1
        self._count_idle(block, 1)

    def _remove_idle(self, block: Block) -> None:
        del self.idle[block.offset]
        self._count_idle(block, -1)

    def _count_idle(self, block: Block, change: int) -> None:
        slab = block.offset // self.arena.slab_units
        self._slab_idle[slab] += change
        self._class_idle[block.block_class] = self._class_idle.get(block.block_class, 0) + change
        self.idle_bytes += change * self.arena.block_bytes(block.block_class)
        self._recount(slab)

    def _recount(self, slab: int) -> None:
        """Keep account of slabs that giving up idle blocks alone would empty."""
        before = self._whole.pop(slab, None)
        if before is not None:
            self._whole_blocks[before[0]] -= before[1]
            self._whole_slabs[before[0]] -= 1
        block_class, idle = self.arena.slab_class(slab), self._slab_idle[slab]
        if idle and block_class is not None and idle == self.arena.slab_used(slab):
            self._whole[slab] = (block_class, idle)
            self._whole_blocks[block_class] = self._whole_blocks.get(block_class, 0) + idle
            self._whole_slabs[block_class] = self._whole_slabs.get(block_class, 0) + 1

    def _reclaim(self, block_class: BlockClass, avoid_slab: int) -> bool:
        """Give up the least recently used idle block that makes room for a class; with its slab if that is needed."""
        if self._idle_unsorted:
            self.idle = dict(sorted(self.idle.items(), key=lambda item: item[1].last_used))
            self._idle_unsorted = False
        for block in self.idle.values():
            slab = block.offset // self.arena.slab_units
            if slab == avoid_slab:
                continue
            if block.block_class == block_class:
                self._give_up(block)
                return True
            if slab in self._whole:
                for other in list(self.blocks_in(slab)):
                    self._give_up(other)
                return True
        return False

    def num_idle(self, block_class: BlockClass) -> int:
        """Idle blocks of a class."""
        return self._class_idle.get(block_class, 0)

    def num_idle_in(self, slab: int) -> int:
        """Idle blocks in a slab."""
        return self._slab_idle[slab]

    @property
    def num_whole_slabs(self) -> int:
        """Slabs that giving up idle blocks alone would empty."""
        return len(self._whole)

    def give_up_idle(self, slab: int) -> None:
        """Give up the idle blocks of a slab."""
        for block in list(self.blocks_in(slab)):
            if block.offset in self.idle:
                self._give_up(block)

    def blocks_in(self, slab: int) -> Iterator[Block]:
        """The blocks of a slab by offset."""
        block_class = self.arena.slab_class(slab)
        if block_class is None:
            return
        units = self.arena.block_bytes(block_class) // OFFSET_UNIT
        start = slab * self.arena.slab_units
        for slot in range(self.arena.per_slab(block_class)):
            block = self.blocks.get(start + slot * units)
            if block is not None:
                yield block

    def _give_up(self, block: Block) -> None:
        self._forget(block)
        self.dropped_idle += 1
        if block.nodes:
            raise IntegrityError(f"block {block.offset} was given up but the prefix cache keeps it")
        self.settle(block)

    # -- blocks that should have another class --------------------------------------------------------------------

    def mark_stale(self, block: Block) -> None:
        """The block could be converted now."""
        if not block.is_stale:
            block.is_stale = True
            self.stale.setdefault(block.offset // self.arena.slab_units, {})[block.offset] = block
            self.stale_bytes += self.arena.block_bytes(block.block_class)

    def unmark_stale(self, block: Block) -> None:
        """The block has its class, or cannot get it for now."""
        if block.is_stale:
            block.is_stale = False
            slab = block.offset // self.arena.slab_units
            del self.stale[slab][block.offset]
            if not self.stale[slab]:
                del self.stale[slab]
            self.stale_bytes -= self.arena.block_bytes(block.block_class)

    # -- audit ----------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every block is in exactly one state and every count is right."""
        used = self.arena.check_integrity()
        counts: dict[BlockClass, int] = {}
        idle: dict[BlockClass, int] = {}
        slab_idle = [0] * self.arena.num_slabs
        stale_bytes = idle_bytes = resident = 0
        for offset, block in self.blocks.items():
            size = self.arena.block_bytes(block.block_class)
            counts[block.block_class] = counts.get(block.block_class, 0) + 1
            resident += size
            slab = self.arena.slab_of(offset)
            _require(block.offset == offset, f"block {block.offset} is listed at {offset}")
            _require(self.arena.slab_class(slab) == block.block_class, f"block {offset} is not of its slab's class")
            _require(block.first % block.size == 0, f"block {offset} of {block.size} starts at {block.first}")
            _require(0 <= block.filled <= block.size, f"block {offset} of {block.size} has {block.filled} tokens")
            should_idle = not block.holders and not block.in_recode
            _require((offset in self.idle) == should_idle, f"block {offset}: idle list is wrong")
            _require(not should_idle or bool(block.nodes), f"block {offset} is nobody's and not freed")
            _require(block.is_stale == (offset in self.stale.get(slab, {})), f"block {offset}: stale list is wrong")
            for position in block.nodes:
                inside = block.first <= position and position + CHUNK_TOKENS <= block.first + block.filled
                _require(inside, f"block {offset} is cached for {position} but holds {block.first}+{block.filled}")
            if should_idle:
                idle[block.block_class] = idle.get(block.block_class, 0) + 1
                slab_idle[slab] += 1
                idle_bytes += size
            stale_bytes += size * block.is_stale
        _require(counts == used == self.class_counts, f"blocks {counts}, slabs {used}, counted {self.class_counts}")
        _require(slab_idle == self._slab_idle, f"idle by slab {slab_idle}, counted {self._slab_idle}")
        _require(idle == {c: n for c, n in self._class_idle.items() if n}, f"idle {idle}, counted {self._class_idle}")
        whole = {s for s, n in enumerate(slab_idle) if n and n == self.arena.slab_used(s)}
        _require(whole == set(self._whole), f"wholly idle slabs {whole}, counted {set(self._whole)}")
        _require(sum(map(len, self.stale.values())) == sum(b.is_stale for b in self.blocks.values()), "stale list")
        _require(
            (resident, idle_bytes, stale_bytes) == (self.resident_bytes, self.idle_bytes, self.stale_bytes),
            f"bytes {(resident, idle_bytes, stale_bytes)}, counted "
            f"{(self.resident_bytes, self.idle_bytes, self.stale_bytes)}",
        )


def _sizes_at(position: int, block_size: int) -> list[int]:
    fits = [size for size in BLOCK_SIZES if position % size == 0]
    return [size for size in reversed(fits) if size <= block_size] + [size for size in fits if size > block_size]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise IntegrityError(message)
