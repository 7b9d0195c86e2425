"""Which blocks of KV move between device and host memory, and when. Bookkeeping only: no torch, no bytes.

Out go the blocks of *parked* sequences (preempted with their KV kept), and copies of idle cached blocks that are likely
to be given up soon (*shadows*), so that giving one up only lets its shadow take its place. In come the blocks that a
request needs before it runs (:mod:`engine.host_loads`): those of its cached prefix, or its own if it was parked. Some
may stay, and are streamed (:mod:`engine.host_streams`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain

from engine.arena import IntegrityError
from engine.block_pool import BlockPool
from engine.cache_sequence import CacheSequence
from engine.clock import Clock
from engine.host_books import HostBooks
from engine.host_departures import HostDepartures
from engine.host_flights import HostFlights
from engine.host_loads import HostLoads
from engine.host_streams import HostStreams
from engine.offload_cost import OffloadCost
from engine.pool_block import DEVICE, HOST, Block
from engine.prefix_cache import PrefixCache
from engine.recoder import Recoder
from engine.stats import Counters
from engine.transfers import Direction, HostLink, Transfer
from engine.versions import Versions


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
        self.cost = OffloadCost(link, counters)
        self.books = books = HostBooks(pools, recoders, prefix, sequences, versions)
        self.streams = HostStreams(books, self.cost, buffers)
        self._loads = HostLoads(books, self.streams, clock=clock, counters=counters)
        self._flights = HostFlights(books, self.cost)
        self._departures = HostDepartures(books)
        self._pools = pools
        self._hosts = books.hosts
        self._recoders = recoders
        self._sequences = sequences
        self._clock = clock
        self._counters = counters
        self._planned_ns: int | None = None
        for group, pool in enumerate(pools):
            pool.released = partial(self._departures.released, group)
            pool.demote = partial(books.demote, group)

    # -- leaving --------------------------------------------------------------------------------------------------

    def park(self, sequence: CacheSequence) -> None:
        """A preempted sequence keeps its KV, which moves to the host as far as nobody else needs it here."""
        sequence.is_parked = True
        self.streams.stop(sequence)
        for group, table in enumerate(sequence.tables):
            for block in list(table.blocks):
                self.released(group, block)

    def released(self, group: int, block: Block) -> None:
        """See :meth:`HostDepartures.released`."""
        self._departures.released(group, block)

    def is_parked_here(self, sequence: CacheSequence) -> bool:
        """Whether a parked sequence has blocks on the device that only parked ones hold and that no copy pins."""
        return sequence.is_parked and any(
            block.tier == DEVICE and not block.is_pinned and self.books.is_dispensable(group, block)
            for group, table in enumerate(sequence.tables)
            for block in table.blocks
        )

    def press(self, sequence: CacheSequence, needed: Sequence[int]) -> bool:
        """Let a running sequence have more of its oldest blocks on the host, worth so many bytes per group; False, with
        nothing changed, if it has not as many, or the link or the host is not good for them.
        """
        if not self.enabled or self._departures.is_host_full or sequence.is_parked or sequence.serial in self._loads:
            return False
        going = self.streams.press(sequence, needed)
        for group, blocks in enumerate(going or ()):
            for block in blocks:
                self.released(group, block)
        return going is not None

    # -- loads ----------------------------------------------------------------------------------------------------

    def begin_load(self, sequence: CacheSequence, *, keep_slabs: int, room: Sequence[int] | None = None) -> bool:
        """Reserve room for all that a sequence has on the host; False, with nothing changed, where there is none.

        With ``room`` (bytes per group) only the newest blocks that fit it come, and the rest is streamed while the
        sequence runs, if buffers and link are good for that.
        """
        return self._loads.begin(sequence, keep_slabs=keep_slabs, room=room)

    def is_loaded(self, sequence: CacheSequence) -> bool:
        """Whether a loading sequence has all it waits for, and nothing it is going to write to is being copied."""
        if not self._loads.is_complete(sequence):
            return False
        return not any(table.blocks[-1].in_transfer for table in sequence.tables if table.blocks)

    def end_load(self, sequence: CacheSequence) -> tuple[bool, int]:
        """A loaded sequence runs now; returns whether it was parked, and how many tokens it has waited for."""
        return self._loads.end(sequence)

    def stop_load(self, sequence: CacheSequence, *, park: bool = True) -> bool:
        """Give a load up (nothing if there is none). A sequence that came from there is parked again, with what had
        arrived, unless not ``park``; True if it is.
        """
        parks = self._loads.stop(sequence) and park
        if parks:
            self.park(sequence)
        return parks

    # -- planning -------------------------------------------------------------------------------------------------

    def plan(self) -> tuple[Transfer, ...]:
        """Copies to start now. Call once a step: how much is under way at most follows from how long steps take."""
        if self.is_asleep:
            self._planned_ns = None  # nobody asks how long steps take while they come and go in runs
            return ()
        now_ns = self._clock.now_ns()
        if self._planned_ns is not None:
            self.cost.note_step(now_ns - self._planned_ns)
        self._planned_ns = now_ns
        arrivals = chain(self._loads.moves(), self.streams.promotions())
        return (
            *self._flights.start(Direction.IN, arrivals),
            *self._flights.start(Direction.OUT, self._departures.moves() if self.enabled else iter(())),
        )

    # -- results --------------------------------------------------------------------------------------------------

    def finish(self, numbers: Iterable[int]) -> None:
        """The executor has made these copies. Unknown numbers are ignored."""
        for number in numbers:
            flight = self._flights.end(number)
            if flight is None:
                continue
            transfer = flight.transfer
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
        is_dispensable = self.books.is_dispensable(group, block)
        wanted = is_dispensable or (self.enabled and bool(block.holders or block.nodes))
        if wanted and not self.books.grows(group, block):
            pool.take_place(shadow, block)
            pool.link(block, shadow)
        pool.settle(shadow)
        if is_dispensable:
            self.books.demote(group, block)
            return
        pool.settle(block)
        if block.holders or block.nodes:
            self._recoders[group].consider(block)

    def _has_arrived(self, group: int, source: Block, block: Block) -> None:
        pool = self._pools[group]
        del self.books.targets[group][source.offset]
        source.in_transfer = block.in_transfer = False
        is_awaited = self._loads.arrived(group, source)
        # What a load asked for is taken even where the sequence could do without: it is to be converted.
        if is_awaited or (source.holders and not self.books.is_dispensable(group, source)):
            self.books.rename(group, source, block)
            if self.enabled and not self.books.grows(group, block):
                pool.link(block, source)
        pool.settle(source)
        pool.settle(block)
        if block.holders:
            self._recoders[group].consider(block)

    def cancel(self, numbers: Iterable[int]) -> list[CacheSequence]:
        """The executor could not make these copies. Returns the loading sequences that will not get what they need."""
        failed: dict[int, None] = {}
        for number in numbers:
            flight = self._flights.end(number)
            if flight is None:
                continue
            transfer = flight.transfer
            group, pool = transfer.group, self._pools[transfer.group]
            for source, target in flight.pairs:
                source.in_transfer = target.in_transfer = False
                if transfer.direction is Direction.IN:
                    del self.books.targets[group][source.offset]
                    self.streams.stay(group, source)
                    failed.update(dict.fromkeys(self._loads.waiting_for(group, source)))
                pool.settle(target)
                pool.settle(source)
                self.released(group, source)
        return [self._sequences[serial] for serial in failed]

    # -- what is to come ------------------------------------------------------------------------------------------

    @property
    def is_asleep(self) -> bool:
        """Whether it is switched off, and holds and moves nothing any more."""
        if self.enabled or len(self._flights) or len(self._loads) or len(self.streams):
            return False
        return not any(host.blocks for host in self._hosts)

    @property
    def num_in_flight(self) -> int:
        """Transfers that have neither finished nor been cancelled."""
        return len(self._flights)

    def coming_bytes(self, group: int) -> int:
        """Bytes of a group's device pool that copies under way or about to start will make available."""
        coming = self._flights.leaving_bytes(group)
        return coming + self._departures.coming_bytes(group) if self.enabled else coming

    def has_plans(self) -> bool:
        """Whether a later ``plan`` may find something, even if no step is run until then."""
        if self._loads.has_moves:
            return True
        return self.enabled and self._departures.has_any()

    def bytes_to_load(self, group: int, blocks: Iterable[Block]) -> int:
        """Room on the device that blocks need which lie on the host and are not on their way."""
        return self.books.bytes_to_load(group, blocks)

    def should_park(self, sequence: CacheSequence) -> bool:
        """Whether a sequence that loses its place should keep its KV: if that is faster than computing it again, or
        if computing it again would not give the same.
        """
        if not self.enabled or not sequence.committed or self._departures.is_host_full:
            return False
        books = self.books
        num_bytes = 0
        for group in range(len(sequence.tables)):
            own = books.own_bytes(group, sequence)
            if own > books.host_room_bytes(group):
                return False
            num_bytes += own
        if sequence.lossiest or sequence.is_evicted:
            return True
        queued = self._flights.queued[Direction.OUT] + self._departures.queued_bytes()
        return self.cost.swap_pays(num_bytes, queued, sequence.committed)

    def load_pays(self, num_bytes: int, num_tokens: int) -> bool:
        """Whether loading so many bytes is faster than computing so many tokens."""
        ahead = self._loads.waiting_bytes() + self._flights.queued[Direction.IN]
        return self.cost.load_pays(num_bytes + ahead, num_tokens)

    # -- settings and audits --------------------------------------------------------------------------------------

    def set_enabled(self, enabled: bool) -> None:
        """The ``host_offload`` knob. Off: nothing more goes out, what is only cached there is given up, and what
        sequences have there comes back when they do.
        """
        self.enabled = enabled
        self._departures.look_again()
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
                    is_streamed = block.is_sealed and sequence.serial in self.streams
                    if block.tier == HOST and not is_streamed:
                        raise IntegrityError(f"{sequence.request_id} runs, and block {block} is on the host")

    def pinned(self, group: int) -> set[tuple[int, int]]:
        """For audits: (tier, offset) of all blocks of a group that copies need as they are."""
        return {(DEVICE, target.offset) for target in self.books.targets[group].values()} | self._flights.pinned(group)
