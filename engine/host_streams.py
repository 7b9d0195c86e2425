"""Blocks that running sequences have on the host, to be *streamed* to every step. Bookkeeping only: no torch, no bytes.

Where not all of a sequence fits, its old sealed blocks may stay on the host while it runs, as long as the link brings
them within the time of a step. They come back as room appears.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.cache_sequence import CacheSequence
from engine.host_books import HostBooks, Move, total_bytes
from engine.offload_cost import OffloadCost
from engine.pool_block import DEVICE, HOST, Block
from engine.stream_layout import stream_slot_bytes

# Streamed blocks come back while more than this share could be had without losing anything.
_PROMOTE_SHARE = 0.1


class HostStreams:
    """Which blocks are streamed, and which may be."""

    def __init__(self, books: HostBooks, cost: OffloadCost, buffers: Sequence[int]) -> None:
        """``buffers``: per group, bytes of each of the two buffers through which blocks are streamed; 0 for none."""
        self._books = books
        self._cost = cost
        self._buffers = tuple(buffers)
        self._streaming: dict[int, None] = {}  # serials of sequences that run with blocks on the host

    def __contains__(self, serial: int) -> bool:
        return serial in self._streaming

    def __len__(self) -> int:
        return len(self._streaming)

    def is_settled(self, group: int, block: Block) -> bool:
        """Full, and in the format that it should have: what is to be converted has to come back for that."""
        target = self._books.recoders[group].targets.target_class(block)
        return block.is_sealed and target.kv_format == block.block_class.kv_format

    def stream_below(self, sequence: CacheSequence, group: int, position: int) -> None:
        """The sequence may have full blocks below ``position`` on the host while it runs."""
        sequence.host_below[group] = position
        if position:
            self._streaming[sequence.serial] = None

    def stop(self, sequence: CacheSequence) -> None:
        """The sequence runs no more: where its blocks are is nobody's concern for now."""
        sequence.host_below = [0] * len(sequence.tables)
        self._streaming.pop(sequence.serial, None)

    def press(self, sequence: CacheSequence, needed: Sequence[int]) -> list[list[Block]] | None:
        """Let a running sequence have more of its oldest blocks on the host, worth so many bytes per group; returns
        these. None, with nothing changed, if it has not as many, or the link or the host is not good for them.
        """
        books = self._books
        going = [self._oldest(sequence, group, size) for group, size in enumerate(needed)]
        if not any(going) or not self.can_stream(going):
            return None
        for group, (blocks, size) in enumerate(zip(going, needed, strict=True)):
            own = sum(books.size(group, block) for block in blocks)
            if own < size or own > books.host_room_bytes(group):
                return None
        for group, blocks in enumerate(going):
            if blocks:
                self.stream_below(sequence, group, blocks[-1].end)
        return going

    def _oldest(self, sequence: CacheSequence, group: int, num_bytes: int) -> list[Block]:
        """The next blocks of a sequence to go to the host, worth ``num_bytes`` or all there are."""
        table, found = sequence.tables[group], list[Block]()
        limit = sequence.committed - self._books.recoders[group].recent_tokens
        for index in range(table.index_from(sequence.host_below[group]), len(table.blocks)):
            block = table.blocks[index]
            if num_bytes <= 0 or block.end > limit or not self.is_settled(group, block):
                break
            if len(block.holders) > 1 or block.is_pinned or block.tier == HOST:
                break
            found.append(block)
            num_bytes -= self._books.size(group, block)
        return found

    def _streamed(self) -> Iterator[tuple[int, Block, CacheSequence]]:
        """What running sequences attend on the host, or may have there soon, newest first; for each of them."""
        for serial in list(self._streaming):
            sequence = self._books.sequences.get(serial)
            if sequence is None:
                del self._streaming[serial]
                continue
            found = False
            for group, table in enumerate(sequence.tables):
                for block in reversed(table.blocks):
                    if block.tier == HOST or block.end <= sequence.host_below[group]:
                        found = True
                        yield group, block, sequence
            if not found:
                self.stop(sequence)

    def can_stream(self, staying: Sequence[Sequence[Block]]) -> bool:
        """Whether the link can bring these, and all that is streamed already, in the time of a step."""
        books = self._books
        num_bytes = 0
        slots = [0] * len(books.pools)
        more = [(group, block) for group, blocks in enumerate(staying) for block in blocks]
        for group, block in (*((group, block) for group, block, _ in self._streamed()), *more):
            shape, kv_format = books.pools[group].arena.shape, block.block_class.format
            num_bytes += books.size(group, block)
            slots[group] += block.size // kv_format.tile_tokens * stream_slot_bytes(shape, kv_format)
        fits = all(need <= size for need, size in zip(slots, self._buffers, strict=True))
        return fits and num_bytes <= self._cost.stream_bytes()

    def promotions(self) -> Iterator[Move]:
        """Streamed blocks come back while there is room to spare."""
        books = self._books
        for group, source, sequence in list(self._streamed()):
            pool = books.pools[group]
            if books.spare_bytes(group) - books.size(group, source) < _PROMOTE_SHARE * total_bytes(pool):
                continue
            if source.offset in books.targets[group]:
                continue
            if source.tier == DEVICE:
                self.stream_below(sequence, group, source.first)
                continue
            if source.in_transfer:
                return  # it has only just left
            target = pool.take(source.block_class, source.first, keep_slabs=pool.reserve_slabs)
            if target is None:
                return
            self.stream_below(sequence, group, source.first)
            books.expect(group, source, target)
            yield group, source, target

    def stay(self, group: int, source: Block) -> None:
        """A streamed block does not come back after all."""
        for holder in source.holders:
            if holder in self._streaming:
                sequence = self._books.sequences[holder]
                self.stream_below(sequence, group, max(sequence.host_below[group], source.end))
