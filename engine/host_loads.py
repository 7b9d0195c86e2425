"""Sequences that wait for KV from the host: which blocks come, into which room. Bookkeeping only: no torch, no bytes.

A sequence that is *loading* holds its blocks already; it may run once none of those that it waits for is left on the
host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from engine.cache_sequence import CacheSequence
from engine.clock import Clock
from engine.host_books import HostBooks, Move
from engine.host_streams import HostStreams
from engine.pool_block import DEVICE, HOST, Block
from engine.stats import Counters


@dataclass(eq=False)
class _Load:
    """What a sequence waits for: the sources in ``awaited`` (group, offset on the host), of which ``moves`` are not yet
    sent for. ``tokens``: those in blocks that came from the host.
    """

    was_parked: bool
    since_ns: int
    tokens: int = 0
    awaited: set[tuple[int, int]] = field(default_factory=set)
    moves: deque[Move] = field(default_factory=deque)


class HostLoads:
    """Begins, ends and gives up loads."""

    def __init__(self, books: HostBooks, streams: HostStreams, *, clock: Clock, counters: Counters) -> None:
        self._books = books
        self._streams = streams
        self._clock = clock
        self._counters = counters
        self._loads: dict[int, _Load] = {}  # by serial, oldest first

    def __contains__(self, serial: int) -> bool:
        return serial in self._loads

    def __len__(self) -> int:
        return len(self._loads)

    # -- beginning ------------------------------------------------------------------------------------------------

    def begin(self, sequence: CacheSequence, *, keep_slabs: int, room: Sequence[int] | None = None) -> bool:
        """See :meth:`engine.host_tier.HostTier.begin_load`."""
        load = _Load(sequence.is_parked, self._clock.now_ns())
        staying: list[list[Block]] = []
        for group, table in enumerate(sequence.tables):
            tokens = sum(s - b.first for b, s in zip(table.blocks, table.stops, strict=True) if b.tier == HOST)
            load.tokens = max(load.tokens, tokens)
            limit = sequence.committed - self._books.recoders[group].recent_tokens
            stay = self._reserve(load, group, table.blocks, keep_slabs, None if room is None else (room[group], limit))
            if stay is None:
                break
            staying.append(stay)
        if len(staying) < len(sequence.tables) or (any(staying) and not self._streams.can_stream(staying)):
            self._books.expect_no_more(load.moves)
            return False
        for group, blocks in enumerate(staying):
            self._streams.stream_below(sequence, group, max((block.end for block in blocks), default=0))
        sequence.is_parked = False
        self._loads[sequence.serial] = load
        return True

    def _reserve(
        self, load: _Load, group: int, blocks: Sequence[Block], keep_slabs: int, room: tuple[int, int] | None
    ) -> list[Block] | None:
        """Take targets for the blocks that are on the host, newest first; those that stay there, None if that fails.

        ``room``: bytes, and the position up to which blocks may stay.
        """
        books = self._books
        staying: list[Block] = []
        left = room[0] if room is not None else 0
        for source in reversed(blocks):
            if source.tier == DEVICE:
                continue
            if source.offset in books.targets[group]:
                load.awaited.add((group, source.offset))  # on its way already, for somebody else
                continue
            size, target = books.size(group, source), None
            may_stay = room is not None and source.end <= room[1] and self._streams.is_settled(group, source)
            if size <= left or not may_stay:
                target = books.pools[group].take(source.block_class, source.first, keep_slabs=keep_slabs)
            if target is None:
                if not may_stay:
                    return None
                staying.append(source)
                left = 0
                continue
            left = max(0, left - size)
            books.expect(group, source, target)
            load.awaited.add((group, source.offset))
            load.moves.append((group, source, target))
        return staying

    def moves(self) -> Iterator[Move]:
        """What is to be sent for, oldest load first; what has been asked for is sent for."""
        for load in list(self._loads.values()):
            while load.moves:
                yield load.moves.popleft()

    # -- waiting --------------------------------------------------------------------------------------------------

    def is_complete(self, sequence: CacheSequence) -> bool:
        """Whether a sequence has all it waits for."""
        load = self._loads.get(sequence.serial)
        return load is None or not load.awaited

    @property
    def has_moves(self) -> bool:
        """Whether something has not been sent for yet."""
        return any(load.moves for load in self._loads.values())

    def waiting_bytes(self) -> int:
        """Bytes that have not been sent for yet."""
        return sum(self._books.size(group, source) for load in self._loads.values() for group, source, _ in load.moves)

    def arrived(self, group: int, source: Block) -> bool:
        """A block has come; whether any load has asked for it."""
        place = (group, source.offset)
        waiting = [self._loads[holder] for holder in source.holders if holder in self._loads]
        is_awaited = any(place in load.awaited for load in waiting)
        for load in waiting:
            load.awaited.discard(place)
        return is_awaited

    def waiting_for(self, group: int, source: Block) -> list[int]:
        """Serials of the sequences that wait for a block."""
        place = (group, source.offset)
        loads = self._loads
        return [holder for holder in source.holders if holder in loads and place in loads[holder].awaited]

    # -- ending ---------------------------------------------------------------------------------------------------

    def end(self, sequence: CacheSequence) -> tuple[bool, int]:
        """See :meth:`engine.host_tier.HostTier.end_load`."""
        load = self._loads.pop(sequence.serial)
        self._counters.host_loads += 1
        self._counters.host_load_time_ns += self._clock.now_ns() - load.since_ns
        return load.was_parked, load.tokens

    def stop(self, sequence: CacheSequence) -> bool:
        """Give a load up (nothing if there is none); whether the sequence was parked before."""
        load = self._loads.pop(sequence.serial, None)
        if load is None:
            return False
        unwanted = []
        for move in load.moves:
            heir = next((self._loads[holder] for holder in move[1].holders if holder in self._loads), None)
            if heir is not None:
                heir.moves.append(move)
            else:
                unwanted.append(move)
        self._books.expect_no_more(unwanted)
        return load.was_parked
