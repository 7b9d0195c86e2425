"""Which blocks of KV move between device and host memory, and when. Bookkeeping only: no torch, no bytes.

Out go the blocks of *parked* sequences (preempted with their KV kept), and copies of idle cached blocks that are likely
to be given up soon (*shadows*), so that giving one up only lets its shadow take its place. In come the blocks that a
request needs before it runs: those of its cached prefix, or its own if it was parked. Copies are made beside the steps;
``plan`` hands them out a few milliseconds' worth at a time, so that an urgent one never waits behind many others.

A table or prefix node names the block on the device where there is one, else the one on the host. A sequence that is
*loading* holds its blocks already; it may run once none of them is left on the host.

Where not all of a parked sequence fits, its old sealed blocks may stay on the host while it runs, to be *streamed* to
every step, as long as the link brings them within the time of a step. They come back as room appears.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from engine.arena import IntegrityError
from engine.block_pool import BlockPool
from engine.cache_sequence import CacheSequence
from engine.clock import Clock
from engine.formats import OFFSET_UNIT
from engine.memory_model import token_bytes
from engine.offload_cost import OffloadCost
from engine.pool_block import DEVICE, HOST, Block
from engine.prefix_cache import PrefixCache
from engine.recoder import Recoder
from engine.stats import Counters
from engine.stream_layout import stream_slot_bytes
from engine.transfers import Direction, HostLink, Transfer
from engine.versions import Versions

# Idle cached blocks are copied ahead, all of them, while less than this share of the pool's slabs is free.
_FREE_SHARE = 0.5
# Streamed blocks come back while more than this share could be had without losing anything.
_PROMOTE_SHARE = 0.1
_UNIT_NS = 1_000_000  # one transfer takes about this long

_Pair = tuple[Block, Block]  # source, target


@dataclass(eq=False)
class _Load:
    """What a sequence waits for: the sources in ``awaited`` (group, offset on the host), of which ``pairs`` (group,
    source, target) are not yet sent for. ``tokens``: those in blocks that came from the host.
    """

    was_parked: bool
    since_ns: int
    tokens: int = 0
    awaited: set[tuple[int, int]] = field(default_factory=set)
    pairs: deque[tuple[int, Block, Block]] = field(default_factory=deque)


@dataclass(eq=False)
class _Flight:
    """A transfer under way."""

    transfer: Transfer
    pairs: list[_Pair]


class HostTier:
    """Parks, loads and shadows. Pools, recoders and sequences are the cache manager's; each group's pool has a host."""

    def __init__(
        self,
        pools: Sequence[BlockPool],
        recoders: Sequence[Recoder],
        prefix: PrefixCache,
        sequences: Mapping[int, CacheSequence],
        versions: Versions,
        *,
        link: HostLink,
        buffers: Sequence[int],
        clock: Clock,
        counters: Counters,
    ) -> None:
        """``buffers``: per group, bytes of each of the two buffers through which blocks are streamed; 0 for none."""
        self.enabled = False
        self._stream_buffers = tuple(buffers)
        self._streaming: dict[int, None] = {}  # serials of sequences that run with blocks on the host
        self.cost = OffloadCost(link, counters)
        self._pools = pools
        self._hosts = [pool.host for pool in pools if pool.host is not None]
        self._recoders = recoders
        self._prefix = prefix
        self._sequences = sequences
        self._versions = versions
        self._clock = clock
        self._counters = counters
        self._leaving: list[dict[int, Block]] = [{} for _ in pools]  # nobody needs them on the device, in order
        self._blocked_at: int | None = None  # the host pools' version when the next leaving block found no room
        self._shadows_blocked_at: list[int | None] = [None] * len(pools)  # the same for shadows, by group
        self._loads: dict[int, _Load] = {}  # by serial, oldest first
        self._targets: list[dict[int, Block]] = [{} for _ in pools]  # by the source's offset on the host
        self._flights: dict[int, _Flight] = {}
        self._queued = {Direction.OUT: 0, Direction.IN: 0}  # bytes
        self._next_number = 1
        self._planned_ns: int | None = None

    # -- sequences ------------------------------------------------------------------------------------------------

    def park(self, sequence: CacheSequence) -> None:
        """A preempted sequence keeps its KV, which moves to the host as far as nobody else needs it here."""
        sequence.is_parked = True
        sequence.host_below = [0] * len(sequence.tables)
        self._streaming.pop(sequence.serial, None)
        for group, table in enumerate(sequence.tables):
            for block in list(table.blocks):
                self.released(group, block)

    def released(self, group: int, block: Block) -> None:
        """Somebody let go of a block, or may do without it here: if that goes for all its holders, it may leave."""
        if block.tier != DEVICE or not self._is_dispensable(group, block) or block.is_pinned:
            return
        if block.twin is not None:
            self.demote(group, block)
        else:
            self._leaving[group][block.offset] = block

    def is_parked_here(self, sequence: CacheSequence) -> bool:
        """Whether a parked sequence has blocks on the device that only parked ones hold and that no copy pins."""
        return sequence.is_parked and any(
            block.tier == DEVICE and not block.is_pinned and self._is_dispensable(group, block)
            for group, table in enumerate(sequence.tables)
            for block in table.blocks
        )

    def _is_dispensable(self, group: int, block: Block) -> bool:
        """Whether all that hold a block are parked, or may have it on the host while they run."""
        if not block.holders:
            return False
        for holder in block.holders:
            sequence = self._sequences[holder]
            if not sequence.is_parked and block.end > sequence.host_below[group]:
                return False
        return True

    def begin_load(self, sequence: CacheSequence, *, keep_slabs: int, room: Sequence[int] | None = None) -> bool:
        """Reserve room for all that a sequence has on the host; False, with nothing changed, where there is none.

        With ``room`` (bytes per group) only the newest blocks that fit it come, and the rest is streamed while the
        sequence runs, if buffers and link are good for that.
        """
        load = _Load(sequence.is_parked, self._clock.now_ns())
        staying: list[list[Block]] = []
        for group, table in enumerate(sequence.tables):
            tokens = sum(s - b.first for b, s in zip(table.blocks, table.stops, strict=True) if b.tier == HOST)
            load.tokens = max(load.tokens, tokens)
            limit = sequence.committed - self._recoders[group].recent_tokens
            stay = self._reserve(load, group, table.blocks, keep_slabs, None if room is None else (room[group], limit))
            if stay is None:
                break
            staying.append(stay)
        if len(staying) < len(sequence.tables) or (any(staying) and not self._can_stream(staying)):
            self._release_targets(load.pairs)
            return False
        for group, blocks in enumerate(staying):
            self._stream_below(sequence, group, max((block.end for block in blocks), default=0))
        sequence.is_parked = False
        self._loads[sequence.serial] = load
        return True

    def _reserve(
        self, load: _Load, group: int, blocks: Sequence[Block], keep_slabs: int, room: tuple[int, int] | None
    ) -> list[Block] | None:
        """Take targets for the blocks that are on the host, newest first; those that stay there, None if that fails.

        ``room``: bytes, and the position up to which blocks may stay.
        """
        staying: list[Block] = []
        left = room[0] if room is not None else 0
        for source in reversed(blocks):
            if source.tier == DEVICE:
                continue
            if source.offset in self._targets[group]:
                load.awaited.add((group, source.offset))  # on its way already, for somebody else
                continue
            size, target = self._size(group, source), None
            may_stay = room is not None and source.end <= room[1] and self._is_settled(group, source)
            if size <= left or not may_stay:
                target = self._pools[group].take(source.block_class, source.first, keep_slabs=keep_slabs)
            if target is None:
                if not may_stay:
                    return None
                staying.append(source)
                left = 0
                continue
            left = max(0, left - size)
            target.in_transfer = True
            self._targets[group][source.offset] = target
            load.awaited.add((group, source.offset))
            load.pairs.append((group, source, target))
        return staying

    # -- streaming ------------------------------------------------------------------------------------------------

    def _is_settled(self, group: int, block: Block) -> bool:
        """Full, and in the format that it should have: what is to be converted has to come back for that."""
        target = self._recoders[group].target_class(block)
        return block.is_sealed and target.kv_format == block.block_class.kv_format

    def _stream_below(self, sequence: CacheSequence, group: int, position: int) -> None:
        sequence.host_below[group] = position
        if position:
            self._streaming[sequence.serial] = None

    def press(self, sequence: CacheSequence, needed: Sequence[int]) -> bool:
        """Let a running sequence have more of its oldest blocks on the host, worth so many bytes per group; False, with
        nothing changed, if it has not as many, or the link or the host is not good for them.
        """
        if not self.enabled or self._is_host_full() or sequence.is_parked or sequence.serial in self._loads:
            return False
        going = [self._oldest(sequence, group, size) for group, size in enumerate(needed)]
        if not any(going) or not self._can_stream(going):
            return False
        for group, (blocks, size) in enumerate(zip(going, needed, strict=True)):
            own = sum(self._size(group, block) for block in blocks)
            if own < size or own > self.host_room_bytes(group):
                return False
        for group, blocks in enumerate(going):
            if blocks:
                self._stream_below(sequence, group, blocks[-1].end)
                for block in blocks:
                    self.released(group, block)
        return True

    def _oldest(self, sequence: CacheSequence, group: int, num_bytes: int) -> list[Block]:
        """The next blocks of a sequence to go to the host, worth ``num_bytes`` or all there are."""
        table, found = sequence.tables[group], list[Block]()
        limit = sequence.committed - self._recoders[group].recent_tokens
        for index in range(table.index_from(sequence.host_below[group]), len(table.blocks)):
            block = table.blocks[index]
            if num_bytes <= 0 or block.end > limit or not self._is_settled(group, block):
                break
            if len(block.holders) > 1 or block.is_pinned or block.tier == HOST:
                break
            found.append(block)
            num_bytes -= self._size(group, block)
        return found

    def _streamed(self) -> Iterator[tuple[int, Block, CacheSequence]]:
        """What running sequences attend on the host, or may have there soon, newest first; for each of them."""
        for serial in list(self._streaming):
            sequence = self._sequences.get(serial)
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
                del self._streaming[serial]
                sequence.host_below = [0] * len(sequence.tables)

    def _can_stream(self, staying: Sequence[Sequence[Block]]) -> bool:
        """Whether the link can bring these, and all that is streamed already, in the time of a step."""
        num_bytes = 0
        slots = [0] * len(self._pools)
        more = [(group, block) for group, blocks in enumerate(staying) for block in blocks]
        for group, block in (*((group, block) for group, block, _ in self._streamed()), *more):
            shape, kv_format = self._pools[group].arena.shape, block.block_class.format
            num_bytes += self._size(group, block)
            slots[group] += block.size // kv_format.tile_tokens * stream_slot_bytes(shape, kv_format)
        fits = all(need <= size for need, size in zip(slots, self._stream_buffers, strict=True))
        return fits and num_bytes <= self.cost.stream_bytes()

    def _promotions(self) -> Iterator[tuple[int, Block, Block]]:
        """Streamed blocks come back while there is room to spare."""
        for group, source, sequence in list(self._streamed()):
            pool = self._pools[group]
            if self._spare_bytes(group) - self._size(group, source) < _PROMOTE_SHARE * _total_bytes(pool):
                continue
            if source.offset in self._targets[group]:
                continue
            if source.tier == DEVICE:
                self._stream_below(sequence, group, source.first)
                continue
            if source.in_transfer:
                return  # it has only just left
            target = pool.take(source.block_class, source.first, keep_slabs=pool.reserve_slabs)
            if target is None:
                return
            self._stream_below(sequence, group, source.first)
            target.in_transfer = True
            self._targets[group][source.offset] = target
            yield group, source, target

    # -- loads ----------------------------------------------------------------------------------------------------

    def is_loaded(self, sequence: CacheSequence) -> bool:
        """Whether a loading sequence has all it waits for, and nothing it is going to write to is being copied."""
        load = self._loads.get(sequence.serial)
        if load is not None and load.awaited:
            return False
        return not any(table.blocks[-1].in_transfer for table in sequence.tables if table.blocks)

    def end_load(self, sequence: CacheSequence) -> tuple[bool, int]:
        """A loaded sequence runs now; returns whether it was parked, and how many tokens it has waited for."""
        load = self._loads.pop(sequence.serial)
        self._counters.host_loads += 1
        self._counters.host_load_time_ns += self._clock.now_ns() - load.since_ns
        return load.was_parked, load.tokens

    def stop_load(self, sequence: CacheSequence, *, park: bool = True) -> bool:
        """Give a load up (nothing if there is none). A sequence that came from there is parked again, with what had
        arrived, unless not ``park``; True if it is.
        """
        load = self._loads.pop(sequence.serial, None)
        if load is None:
            return False
        unwanted = []
        for group, source, target in load.pairs:
            heir = next((self._loads[holder] for holder in source.holders if holder in self._loads), None)
            if heir is not None:
                heir.pairs.append((group, source, target))
            else:
                unwanted.append((group, source, target))
        self._release_targets(unwanted)
        if load.was_parked and park:
            self.park(sequence)
        return load.was_parked and park

    def _release_targets(self, pairs: Iterable[tuple[int, Block, Block]]) -> None:
        for group, source, target in pairs:
            del self._targets[group][source.offset]
            target.in_transfer = False
            self._pools[group].settle(target)

    # -- moving names between tiers -------------------------------------------------------------------------------

    def demote(self, group: int, block: Block) -> None:
        """Free a device block that has a twin, which takes its place."""
        shadow = block.twin
        if shadow is None:
            return
        self._rename(group, block, shadow)
        self._pools[group].unlink(block)
        self._pools[group].settle(block)

    def _rename(self, group: int, old: Block, new: Block) -> None:
        self._pools[group].take_place(new, old)
        for serial in list(old.holders):
            table = self._sequences[serial].tables[group]
            index = table.index_from(old.first)
            table.replace(index, index + 1, (new,), (table.stops[index],), self._versions.next())
            del old.holders[serial]
            new.holders[serial] = None
        self._prefix.move(old, (new,), group)

    def _grows(self, group: int, block: Block) -> bool:
        """Whether a sequence that is not parked may still write to a block."""
        if block.is_sealed:
            return False
        for serial in block.holders:
            sequence = self._sequences[serial]
            table = sequence.tables[group]
            if not sequence.is_parked and table.blocks[-1] is block and table.stops[-1] == block.end:
                return True
        return False

    # -- planning -------------------------------------------------------------------------------------------------

    def plan(self) -> tuple[Transfer, ...]:
        """Copies to start now. Call once a step: how much is under way at most follows from how long steps take."""
        now_ns = self._clock.now_ns()
        if self._planned_ns is not None:
            self.cost.note_step(now_ns - self._planned_ns)
        self._planned_ns = now_ns
        return (*self._batched(Direction.IN, self._arrivals()), *self._batched(Direction.OUT, self._departures()))

    def _batched(self, direction: Direction, moves: Iterator[tuple[int, Block, Block]]) -> list[Transfer]:
        limit = self.cost.queue_bytes(direction)
        unit = self.cost.link.bytes_in(direction, _UNIT_NS)
        planned: list[Transfer] = []
        group, pairs, num_bytes = -1, list[_Pair](), 0
        while self._queued[direction] < limit:
            move = next(moves, None)
            if move is None:
                break
            if pairs and (move[0] != group or num_bytes >= unit):
                planned.append(self._depart(direction, group, pairs))
                pairs, num_bytes = [], 0
            group, source, target = move
            source.in_transfer = target.in_transfer = True
            self._pools[group].settle(source)
            pairs.append((source, target))
            size = self._size(group, source)
            num_bytes += size
            self._queued[direction] += size
        if pairs:
            planned.append(self._depart(direction, group, pairs))
        return planned

    def _depart(self, direction: Direction, group: int, pairs: list[_Pair]) -> Transfer:
        rows = tuple(
            (source.offset * OFFSET_UNIT, target.offset * OFFSET_UNIT, self._size(group, source))
            for source, target in pairs
        )
        transfer = Transfer(self._next_number, direction, group, rows)
        self._next_number += 1
        self._flights[transfer.number] = _Flight(transfer, pairs)
        return transfer

    def _size(self, group: int, block: Block) -> int:
        return self._pools[group].arena.block_bytes(block.block_class)

    def _arrivals(self) -> Iterator[tuple[int, Block, Block]]:
        for load in list(self._loads.values()):
            while load.pairs:
                yield load.pairs.popleft()
        yield from self._promotions()

    def _departures(self) -> Iterator[tuple[int, Block, Block]]:
        if not self.enabled:
            return
        for group, leaving in enumerate(self._leaving):
            while leaving and not self._is_host_full():
                block = leaving[next(iter(leaving))]
                if not self._may_leave(group, block):
                    del leaving[block.offset]
                    continue
                target = self._hosts[group].take(block.block_class, block.first, keep_slabs=0)
                if target is None:
                    self._blocked_at = self._host_version()
                    break
                del leaving[block.offset]
                yield group, block, target
        for group, pool in enumerate(self._pools):
            while self._wants_shadows(group, pool):
                block = next(iter(pool.unshadowed.values()))
                target = self._hosts[group].take(block.block_class, block.first, keep_slabs=0, spare_shadows=True)
                if target is None:
                    self._shadows_blocked_at[group] = self._hosts[group].version
                    break
                if block in pool.idle:
                    yield group, block, target
                else:
                    self._hosts[group].settle(target)  # making room there has cost the block the start of its prefix

    def _may_leave(self, group: int, block: Block) -> bool:
        alive = self._pools[group].blocks.get(block.offset) is block
        return alive and not block.is_pinned and self._is_dispensable(group, block)

    def _wants_shadows(self, group: int, pool: BlockPool) -> bool:
        if not pool.unshadowed or self._shadows_blocked_at[group] == self._hosts[group].version:
            return False
        return pool.arena.num_free_slabs < _FREE_SHARE * pool.arena.num_slabs

    @staticmethod
    def _cheap_bytes(pool: BlockPool) -> int:
        """Bytes that requests could have without losing anything."""
        reserve = pool.reserve_slabs * pool.arena.slab_units * OFFSET_UNIT
        return _total_bytes(pool) - reserve - pool.resident_bytes + pool.idle.num_bytes - pool.unshadowed_bytes

    def _spare_bytes(self, group: int) -> int:
        """The same, as far as new tokens could go there: not where slots lie scattered in other classes."""
        pool, size = self._pools[group], self._recoders[group].write_size()
        tokens = pool.available_tokens(size)
        return min(self._cheap_bytes(pool), int(tokens * token_bytes(pool.arena.shape)))

    def _host_version(self) -> int:
        return sum(host.version for host in self._hosts)

    def _is_host_full(self) -> bool:
        return self._blocked_at is not None and self._blocked_at == self._host_version()

    # -- results --------------------------------------------------------------------------------------------------

    def finish(self, numbers: Iterable[int]) -> None:
        """The executor has made these copies. Unknown numbers are ignored."""
        for number in numbers:
            flight = self._flights.pop(number, None)
            if flight is None:
                continue
            transfer = flight.transfer
            self._queued[transfer.direction] -= transfer.num_bytes
            if transfer.direction is Direction.OUT:
                self._counters.host_out_bytes += transfer.num_bytes
                for block, shadow in flight.pairs:
                    self._has_left(transfer.group, block, shadow)
            else:
                self._counters.host_in_bytes += transfer.num_bytes
                for source, block in flight.pairs:
                    self._has_arrived(transfer.group, source, block)

    def _has_left(self, group: int, block: Block, shadow: Block) -> None:
        pool = self._pools[group]
        block.in_transfer = shadow.in_transfer = False
        is_dispensable = self._is_dispensable(group, block)
        wanted = is_dispensable or (self.enabled and bool(block.holders or block.nodes))
        if wanted and not self._grows(group, block):
            pool.take_place(shadow, block)
            pool.link(block, shadow)
        pool.settle(shadow)
        if is_dispensable:
            self.demote(group, block)
            return
        pool.settle(block)
        if block.holders or block.nodes:
            self._recoders[group].consider(block)

    def _has_arrived(self, group: int, source: Block, block: Block) -> None:
        pool = self._pools[group]
        del self._targets[group][source.offset]
        source.in_transfer = block.in_transfer = False
        place = (group, source.offset)
        waiting = [self._loads[holder] for holder in source.holders if holder in self._loads]
        is_awaited = any(place in load.awaited for load in waiting)
        for load in waiting:
            load.awaited.discard(place)
        # What a load asked for is taken even where the sequence could do without: it is to be converted.
        if is_awaited or (source.holders and not self._is_dispensable(group, source)):
            self._rename(group, source, block)
            if self.enabled and not self._grows(group, block):
                pool.link(block, source)
        pool.settle(source)
        pool.settle(block)
        if block.holders:
            self._recoders[group].consider(block)

    def cancel(self, numbers: Iterable[int]) -> list[CacheSequence]:
        """The executor could not make these copies. Returns the loading sequences that will not get what they need."""
        failed: dict[int, None] = {}
        for number in numbers:
            flight = self._flights.pop(number, None)
            if flight is None:
                continue
            transfer = flight.transfer
            group, pool = transfer.group, self._pools[transfer.group]
            self._queued[transfer.direction] -= transfer.num_bytes
            for source, target in flight.pairs:
                source.in_transfer = target.in_transfer = False
                if transfer.direction is Direction.IN:
                    del self._targets[group][source.offset]
                    self._stays_streamed(group, source)
                    place = (group, source.offset)
                    failed.update(
                        (holder, None)
                        for holder in source.holders
                        if holder in self._loads and place in self._loads[holder].awaited
                    )
                pool.settle(target)
                pool.settle(source)
                self.released(group, source)
        return [self._sequences[serial] for serial in failed]

    def _stays_streamed(self, group: int, source: Block) -> None:
        for holder in source.holders:
            if holder in self._streaming:
                sequence = self._sequences[holder]
                self._stream_below(sequence, group, max(sequence.host_below[group], source.end))

    # -- what is to come ------------------------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Transfers that have neither finished nor been cancelled."""
        return len(self._flights)

    def coming_bytes(self, group: int) -> int:
        """Bytes of a group's device pool that copies under way or about to start will make available."""
        coming = sum(
            flight.transfer.num_bytes
            for flight in self._flights.values()
            if flight.transfer.direction is Direction.OUT and flight.transfer.group == group
        )
        if self.enabled and not self._is_host_full():
            leaving = [block for block in self._leaving[group].values() if self._may_leave(group, block)]
            coming += min(sum(self._size(group, block) for block in leaving), self.host_room_bytes(group))
        return coming

    def has_plans(self) -> bool:
        """Whether a later ``plan`` may find something, even if no step is run until then."""
        if any(load.pairs for load in self._loads.values()):
            return True
        if not self.enabled:
            return False
        if any(self._leaving) and not self._is_host_full():
            return True
        return any(self._wants_shadows(group, pool) for group, pool in enumerate(self._pools))

    def host_room_bytes(self, group: int) -> int:
        """Bytes that the host could take, cached ones given up."""
        host = self._hosts[group]
        return _total_bytes(host) - host.resident_bytes + host.idle.num_bytes

    def bytes_to_load(self, group: int, blocks: Iterable[Block]) -> int:
        """Room on the device that blocks need which lie on the host and are not on their way."""
        targets = self._targets[group]
        return sum(self._size(group, b) for b in blocks if b.tier == HOST and b.offset not in targets)

    def should_park(self, sequence: CacheSequence) -> bool:
        """Whether a sequence that loses its place should keep its KV: if that is faster than computing it again, or
        if computing it again would not give the same.
        """
        if not self.enabled or not sequence.committed or self._is_host_full():
            return False
        num_bytes = 0
        for group, table in enumerate(sequence.tables):
            own = sum(
                self._size(group, block)
                for block in table.blocks
                if block.tier == DEVICE and block.twin is None and len(block.holders) == 1
            )
            if own > self.host_room_bytes(group):
                return False
            num_bytes += own
        if sequence.lossiest or sequence.is_evicted:
            return True
        queued = self._queued[Direction.OUT] + sum(
            self._size(group, block) for group, leaving in enumerate(self._leaving) for block in leaving.values()
        )
        return self.cost.swap_pays(num_bytes, queued, sequence.committed)

    def load_pays(self, num_bytes: int, num_tokens: int) -> bool:
        """Whether loading so many bytes is faster than computing so many tokens."""
        waiting = sum(self._size(group, pair) for load in self._loads.values() for group, pair, _ in load.pairs)
        return self.cost.load_pays(num_bytes + waiting + self._queued[Direction.IN], num_tokens)

    # -- settings and audits --------------------------------------------------------------------------------------

    def set_enabled(self, enabled: bool) -> None:
        """The ``host_offload`` knob. Off: nothing more goes out, what is only cached there is given up, and what
        sequences have there comes back when they do.
        """
        self.enabled = enabled
        self._blocked_at = None
        self._shadows_blocked_at = [None] * len(self._pools)
        if not enabled:
            for host in self._hosts:
                host.drop_all_idle()

    def check_integrity(self) -> None:
        """Raises IntegrityError if a running sequence has blocks on the host that are not to be streamed."""
        for sequence in self._sequences.values():
            if sequence.is_parked or sequence.serial in self._loads or sequence.serial < 0:  # pins never run
                continue
            for table in sequence.tables:
                for block in table.blocks:
                    is_streamed = block.is_sealed and sequence.serial in self._streaming
                    if block.tier == HOST and not is_streamed:
                        raise IntegrityError(f"{sequence.request_id} runs, and block {block} is on the host")

    def pinned(self, group: int) -> set[tuple[int, int]]:
        """For audits: (tier, offset) of all blocks of a group that copies need as they are."""
        found = {(DEVICE, target.offset) for target in self._targets[group].values()}
        for flight in self._flights.values():
            if flight.transfer.group == group:
                found |= {(block.tier, block.offset) for pair in flight.pairs for block in pair}
        return found


def _total_bytes(pool: BlockPool) -> int:
    return pool.arena.num_slabs * pool.arena.slab_units * OFFSET_UNIT
