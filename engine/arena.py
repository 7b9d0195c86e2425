"""Slabs of one layer group's arena: which bytes belong to which class of block. No torch.

A slab of fixed size is handed to a class (format, block size) and cut into blocks; when its last block comes back, the
slab is free for any class again. So classes share one pool, and what fragmentation there is lies inside half-used
slabs. Blocks are taken from the fullest slab of their class (so that others can run empty), then the lowest slab, then
the lowest slot: a deterministic order. Sets of slabs and slots are integers used as bit masks, lowest bit first.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.formats import OFFSET_UNIT, BlockClass, KVShape
from engine.memory_model import block_bytes


class IntegrityError(AssertionError):
    """Bookkeeping contradicts itself: a bug, never a user's mistake."""


def lowest_bit(mask: int) -> int:
    """Index of the lowest set bit of a mask > 0."""
    return (mask & -mask).bit_length() - 1


class _Slab:
    """One slab: its class (None while free), a mask of free slots, and the number of used ones."""

    __slots__ = ("block_class", "free", "used")

    def __init__(self) -> None:
        self.block_class: BlockClass | None = None
        self.free = 0
        self.used = 0


class _Class:
    """Slabs of one class. ``by_free[n]``: mask of slabs with n free slots; ``counts``: mask of the n in use, n > 0."""

    __slots__ = ("block_units", "by_free", "counts", "free_slots", "per_slab")

    def __init__(self, block_units: int, per_slab: int) -> None:
        self.block_units = block_units
        self.per_slab = per_slab
        self.by_free = [0] * (per_slab + 1)
        self.counts = 0
        self.free_slots = 0

    def move(self, slab_bit: int, before: int, after: int) -> None:
        """A slab goes from ``before`` to ``after`` free slots; 0 and less are not listed."""
        if before > 0:
            self.by_free[before] &= ~slab_bit
            if not self.by_free[before]:
                self.counts &= ~(1 << before)
        if after > 0:
            self.by_free[after] |= slab_bit
            self.counts |= 1 << after


class Arena:
    """Hands out block offsets, in units of 256 bytes. Knows nothing of sequences.

    Raises ValueError unless slabs are a whole number of 256-byte units.
    """

    def __init__(self, shape: KVShape, num_slabs: int, slab_bytes: int) -> None:
        if num_slabs < 1 or slab_bytes < OFFSET_UNIT or slab_bytes % OFFSET_UNIT:
            raise ValueError(f"an arena is >= 1 slabs of a multiple of {OFFSET_UNIT} bytes: {num_slabs} x {slab_bytes}")
        self.shape = shape
        self.num_slabs = num_slabs
        self.num_free_slabs = num_slabs
        self.slab_units = slab_bytes // OFFSET_UNIT
        self._free_slabs = (1 << num_slabs) - 1
        self._slabs = [_Slab() for _ in range(num_slabs)]
        self._classes: dict[BlockClass, _Class] = {}

    def _class(self, block_class: BlockClass) -> _Class:
        state = self._classes.get(block_class)
        if state is None:
            units = block_bytes(self.shape, block_class) // OFFSET_UNIT
            state = self._classes[block_class] = _Class(units, self.slab_units // units)
        return state

    def per_slab(self, block_class: BlockClass) -> int:
        """Blocks of a class in one slab."""
        state = self._classes.get(block_class) or self._class(block_class)
        return state.per_slab

    def block_bytes(self, block_class: BlockClass) -> int:
        """Bytes of one block of a class."""
        state = self._classes.get(block_class) or self._class(block_class)
        return state.block_units * OFFSET_UNIT

    def free_slots(self, block_class: BlockClass) -> int:
        """Free slots in slabs that belong to a class already."""
        return self._class(block_class).free_slots

    def slab_of(self, offset: int) -> int:
        """Index of the slab that holds an offset."""
        return offset // self.slab_units

    def slab_class(self, slab: int) -> BlockClass | None:
        """The class that a slab is cut for, None while it is free."""
        return self._slabs[slab].block_class

    def slab_used(self, slab: int) -> int:
        """Blocks in use in a slab."""
        return self._slabs[slab].used

    def allocate(self, block_class: BlockClass, *, keep_slabs: int = 0, avoid_slab: int = -1) -> int | None:
        """The offset of a free block, or None.

        A fresh slab is cut only while more than ``keep_slabs`` are free; ``avoid_slab`` is never chosen.
        """
        found = self.allocate_run(block_class, 1, keep_slabs=keep_slabs, avoid_slab=avoid_slab)
        return found[0] if found else None

    def allocate_run(
        self, block_class: BlockClass, number: int, *, keep_slabs: int = 0, avoid_slab: int = -1
    ) -> list[int]:
        """Offsets of ``number`` free blocks, fewer where room ends: as many times :meth:`allocate`."""
        state = self._classes.get(block_class) or self._class(block_class)
        offsets: list[int] = []
        while number:
            index = self._partial_slab(state, avoid_slab) if state.counts else -1
            if index < 0:
                if self.num_free_slabs <= keep_slabs:
                    break
                index = self._cut(state, block_class)
            # A slab that was the fullest is so all the more with less room: the next block comes from it as well.
            slab = self._slabs[index]
            before, free = state.per_slab - slab.used, slab.free
            taken = min(before, number)
            start = index * self.slab_units
            for _ in range(taken):
                lowest = free & -free
                free ^= lowest
                offsets.append(start + (lowest.bit_length() - 1) * state.block_units)
            slab.free = free
            slab.used += taken
            state.free_slots -= taken
            state.move(1 << index, before, before - taken)
            number -= taken
        return offsets

    def _cut(self, state: _Class, block_class: BlockClass) -> int:
        """Hand the lowest free slab to a class; returns its index. It is not listed by free slots yet."""
        index = lowest_bit(self._free_slabs)
        self._free_slabs &= ~(1 << index)
        self.num_free_slabs -= 1
        slab = self._slabs[index]
        slab.block_class, slab.free, slab.used = block_class, (1 << state.per_slab) - 1, 0
        state.free_slots += state.per_slab
        return index

    @staticmethod
    def _partial_slab(state: _Class, avoid_slab: int) -> int:
        counts = state.counts
        while counts:
            slabs = state.by_free[lowest_bit(counts)]
            if avoid_slab >= 0:
                slabs &= ~(1 << avoid_slab)
            if slabs:
                return lowest_bit(slabs)
            counts &= counts - 1
        return -1

    def free(self, offset: int) -> None:
        """Give a block back; its slab too when that was the last. Raises IntegrityError if it is not allocated."""
        self.free_run((offset,))

    def free_run(self, offsets: Iterable[int]) -> None:
        """As many times :meth:`free`."""
        slots: dict[int, int] = {}  # slab -> mask of those that come back
        slab_units = self.slab_units
        for offset in offsets:
            index = offset // slab_units
            slab = self._slabs[index] if 0 <= index < self.num_slabs else _Slab()
            if slab.block_class is None:
                raise IntegrityError(f"offset {offset} is freed but its slab is free")
            state = self._classes[slab.block_class]
            slot, rest = divmod(offset - index * slab_units, state.block_units)
            back = slots.get(index, 0)
            if rest or slot >= state.per_slab or (slab.free | back) >> slot & 1:
                raise IntegrityError(f"offset {offset} is freed but not an allocated block of {slab.block_class}")
            slots[index] = back | 1 << slot
        for index, back in slots.items():
            self._give_back(index, back)

    def _give_back(self, index: int, slots: int) -> None:
        """Slots of a slab, as a mask, are free again."""
        slab = self._slabs[index]
        if slab.block_class is None:
            return
        state = self._classes[slab.block_class]
        before, number = state.per_slab - slab.used, slots.bit_count()
        slab.used -= number
        slab.free |= slots
        state.free_slots += number
        if slab.used:
            state.move(1 << index, before, before + number)
            return
        state.move(1 << index, before, 0)
        state.free_slots -= state.per_slab
        slab.block_class, slab.free = None, 0
        self._free_slabs |= 1 << index
        self.num_free_slabs += 1

    def check_integrity(self) -> dict[BlockClass, int]:
        """Used blocks by class, recounted from the slabs; raises IntegrityError where counts and masks disagree."""
        used: dict[BlockClass, int] = {}
        slots: dict[BlockClass, int] = {}
        for index, slab in enumerate(self._slabs):
            is_free = bool(self._free_slabs >> index & 1)
            if is_free != (slab.block_class is None) or is_free != (slab.used == 0):
                raise IntegrityError(f"slab {index}: listed free {is_free}, class {slab.block_class}, {slab.used} used")
            if slab.block_class is None:
                continue
            state = self._classes[slab.block_class]
            free = slab.free.bit_count()
            if slab.used + free != state.per_slab:
                raise IntegrityError(f"slab {index}: {slab.used} used + {free} free != {state.per_slab}")
            listed = [n for n, mask in enumerate(state.by_free) if mask >> index & 1]
            if listed != ([free] if free else []):
                raise IntegrityError(f"slab {index}: {free} free slots, listed under {listed}")
            used[slab.block_class] = used.get(slab.block_class, 0) + slab.used
            slots[slab.block_class] = slots.get(slab.block_class, 0) + free
        if self._free_slabs.bit_count() != self.num_free_slabs:
            raise IntegrityError(f"{self.num_free_slabs} free slabs counted, mask {self._free_slabs:b}")
        for block_class, state in self._classes.items():
            if state.free_slots != slots.get(block_class, 0):
                found = slots.get(block_class, 0)
                raise IntegrityError(f"{block_class}: {state.free_slots} free slots counted, {found} found")
            if state.counts != sum(1 << n for n, mask in enumerate(state.by_free) if mask):
                raise IntegrityError(f"{block_class}: mask of free counts is off")
        return used
