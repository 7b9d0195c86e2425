"""Cached blocks that nobody holds, and what giving them up would make room for. No torch.

Room for a class comes from one of its own blocks, or from a slab in which every used block is idle (a *whole* slab),
which can then be cut for any class. Who goes first is the policy's choice. Heaps with lazy deletion: a victim costs
O(log n), and where a class has none left, a look at the slabs of other classes that have changed since the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush

from engine.arena import Arena, IntegrityError
from engine.formats import BlockClass
from engine.idle_counts import IdleCounts
from engine.pool_block import Block
from engine.prefix_policy import Lru, PrefixPolicy

_Key = tuple[float, int, int]  # priority, last use, order of arrival
_SLACK = 64  # stale entries that a heap may hold besides as many as there are valid ones


def _nothing_before(_block: Block) -> Block | None:
    return None


class IdleBlocks(IdleCounts):
    """The idle blocks of one pool with their counts by slab and class. Chooses who goes first; frees nothing itself.

    ``before(block)``: the cached block without which a cached block is of no use, if any. It may belong to the other
    tier: both tiers of a group share one policy, so that what goes first is the same order on both.
    """

    def __init__(self, arena: Arena, before: Callable[[Block], Block | None] = _nothing_before) -> None:
        super().__init__(arena)
        self._before = before
        self._policy: PrefixPolicy = Lru()
        self._other: IdleBlocks | None = None
        self._arrivals = 0
        self._keys: dict[int, _Key] = {}  # offset -> its valid entry
        self._heaps: dict[BlockClass, list[tuple[_Key, int]]] = {}  # of (key, offset)
        self._slab_keys: dict[int, _Key] = {}  # whole slab -> its valid entry
        self._slab_heaps: dict[BlockClass, list[tuple[_Key, int]]] = {}  # of (key, slab)
        self._changed: dict[BlockClass, dict[int, None]] = {}  # whole slabs whose entry must be made anew

    def join(self, other: IdleBlocks) -> None:
        """Two tiers of one group."""
        self._other, other._other = other, self
        self._policy = other._policy

    def _owner(self, block: Block) -> IdleBlocks | None:
        """Whose idle block it is; None while it is held or free."""
        if block in self:
            return self
        return self._other if self._other is not None and block in self._other else None

    def add(self, block: Block) -> None:
        """The last holder let go of a cached block."""
        self._count_in(block)
        self._push(block)

    def remove(self, block: Block) -> None:
        """Somebody takes the block up, or it is about to be freed."""
        self._count_out(block)
        del self._keys[block.offset]

    def _whole_changed(self, slab: int) -> None:
        self._slab_keys.pop(slab, None)
        if slab in self._whole:
            self._changed.setdefault(self._whole[slab][0], {})[slab] = None

    # -- who goes first -------------------------------------------------------------------------------------------

    def rank(self, block: Block) -> None:
        """Give a block the priority that it has from now on, before it is added; the last use comes first."""
        if self._policy.is_chained:
            self._enter(self._rank(block))
        else:
            block.priority = self._policy.priority(block)

    def catch_up(self, block: Block) -> None:
        """A block was out of sight for a conversion or a copy, and is about to be added: what was ranked after it since
        may have raised its floor.
        """
        if self._policy.is_chained:
            block.priority = max(block.priority, block.floor)
            self._enter(self._raise_before(block))

    def _enter(self, blocks: Iterable[Block]) -> None:
        for raised in blocks:
            owner = self._owner(raised)
            if owner is not None:
                owner._push(raised)  # noqa: SLF001 - of the same class
                owner._recount(owner._arena.slab_of(raised.offset))  # noqa: SLF001

    def _rank(self, block: Block) -> list[Block]:
        """Give a block its priority; returns idle ones before it that must go later than they would have."""
        block.priority = self._policy.priority(block)
        if not self._policy.is_chained:
            return []
        block.priority = max(block.priority, block.floor)
        return self._raise_before(block)

    def _raise_before(self, block: Block) -> list[Block]:
        raised: list[Block] = []
        before = self._before(block)
        while before is not None and before.floor < block.priority:
            before.floor = block.priority
            if self._owner(before) is None or before.priority >= before.floor:
                break  # not ranked yet, or high enough
            before.priority = before.floor
            raised.append(before)
            block, before = before, self._before(before)
        return raised

    def use_policy(self, policy: PrefixPolicy, blocks: Iterable[Block]) -> None:
        """Another policy from now on, in both tiers. ``blocks``: all of their pools. O(blocks)."""
        tiers = [self] if self._other is None else [self, self._other]
        for tier in tiers:
            tier._policy = policy  # noqa: SLF001 - of the same class
            tier._heaps.clear()  # noqa: SLF001
            tier._keys.clear()  # noqa: SLF001
        unheld: list[Block] = []
        for block in blocks:
            block.priority = block.floor = 0.0
            if not block.holders:
                unheld.append(block)
        unheld.sort(key=lambda block: block.last_used)  # the end of a prefix comes before its start
        for block in unheld:
            if block.nodes:
                self._rank(block)
        for block in unheld:
            owner = self._owner(block)
            if owner is not None:
                owner._list(block)  # noqa: SLF001
        for tier in tiers:
            for heap in tier._heaps.values():  # noqa: SLF001
                heapify(heap)
            for slab in list(tier._whole):  # noqa: SLF001
                tier._recount(slab)  # noqa: SLF001

    def _list(self, block: Block) -> None:
        """Enter a block, in a heap that is put in order later."""
        self._arrivals += 1
        key = self._keys[block.offset] = (block.priority, block.last_used, self._arrivals)
        self._heaps.setdefault(block.block_class, []).append((key, block.offset))

    def victim(self, block_class: BlockClass, avoid_slab: int) -> tuple[Block, bool] | None:
        """Who goes first to make room for a class, and whether its whole slab must go; None if nothing helps.

        The policy takes it as given up.
        """
        own = self._first_block(block_class, avoid_slab)
        other = self._first_slab(block_class, avoid_slab)
        if other is not None and (own is None or other[0] < own[0]):
            key, slab = other
            self._policy.gave_up(key[0])
            return next(self._blocks_in(slab)), True
        if own is None:
            return None
        self._policy.gave_up(own[0][0])
        return self.blocks[own[1]], False

    def _push(self, block: Block) -> None:
        offset, kind = block.offset, block.block_class
        self._arrivals += 1
        key = self._keys[offset] = (block.priority, block.last_used, self._arrivals)
        heap = self._heaps.get(kind)
        if heap is None:
            heap = self._heaps[kind] = []
        heappush(heap, (key, offset))
        if len(heap) > 2 * self._by_class.get(kind, 0) + _SLACK:
            heap[:] = [entry for entry in heap if self._keys.get(entry[1]) == entry[0]]
            heapify(heap)

    def _first_block(self, block_class: BlockClass, avoid_slab: int) -> tuple[_Key, int] | None:
        heap, keys = self._heaps.get(block_class), self._keys
        if not heap:
            return None
        avoided: list[tuple[_Key, int]] = []
        while heap:
            key, offset = heap[0]
            if keys.get(offset) == key:
                if avoid_slab < 0 or offset // self._arena.slab_units != avoid_slab:
                    break
                avoided.append(heap[0])
            heappop(heap)
        first = heap[0] if heap else None
        for entry in avoided:
            heappush(heap, entry)
        return first

    def _first_slab(self, block_class: BlockClass, avoid_slab: int) -> tuple[_Key, int] | None:
        """The whole slab of another class that goes first."""
        if len(self._whole) == self._whole_slabs.get(block_class, 0):
            return None
        best: tuple[_Key, int] | None = None
        for other in [c for c, count in self._whole_slabs.items() if count and c != block_class]:
            heap = self._slab_heaps.setdefault(other, [])
            for slab in self._changed.pop(other, ()):
                if self._whole.get(slab, (None,))[0] == other:
                    choose = max if self._policy.spares_best else min
                    key = self._slab_keys[slab] = choose(self._keys[b.offset] for b in self._blocks_in(slab))
                    heappush(heap, (key, slab))
            if len(heap) > 2 * self.num_whole_slabs_of(other) + _SLACK:
                heap[:] = [entry for entry in heap if self._slab_keys.get(entry[1]) == entry[0]]
                heapify(heap)
            while heap and self._slab_keys.get(heap[0][1]) != heap[0][0]:
                heappop(heap)
            found = heap[0] if heap else None
            if found is not None and found[1] == avoid_slab:  # rare: blocks there have been given up by then
                rest = [entry for entry in heap if self._slab_keys.get(entry[1]) == entry[0] and entry[1] != avoid_slab]
                found = min(rest, default=None)
            if found is not None and (best is None or found < best):
                best = found
        return best

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every idle block and whole slab can be found by its valid entry."""
        entries = {block_class: set(heap) for block_class, heap in self._heaps.items()}
        for offset, block in self.blocks.items():
            key = self._keys.get(offset)
            if key is None or key[:2] != (block.priority, block.last_used):
                raise IntegrityError(f"idle block {offset} has the entry {key}, not its own")
            if (key, offset) not in entries[block.block_class]:
                raise IntegrityError(f"idle block {offset} would never be given up")
            before = self._before(block) if self._policy.is_chained else None
            if before is not None and before.floor < block.priority:
                raise IntegrityError(f"idle block {offset} would outlive block {before.offset}, its start")
        if len(self._keys) != len(self.blocks):
            raise IntegrityError(f"{len(self._keys)} entries for {len(self.blocks)} idle blocks")
        for slab, (block_class, _) in self._whole.items():
            if slab not in self._changed.get(block_class, {}) and slab not in self._slab_keys:
                raise IntegrityError(f"slab {slab} of idle blocks would never be given up")
