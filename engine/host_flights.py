"""Copies between device and host memory that are under way. Bookkeeping only: no torch.

Copies are made beside the steps, and handed out a few milliseconds' worth at a time, so that an urgent one never waits
behind many others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine.formats import OFFSET_UNIT
from engine.host_books import HostBooks, Move
from engine.offload_cost import OffloadCost
from engine.pool_block import Block
from engine.transfers import Direction, Transfer

_UNIT_NS = 1_000_000  # one transfer takes about this long

_Pair = tuple[Block, Block]  # source, target


@dataclass(eq=False)
class Flight:
    """A transfer under way, and the blocks (source, target) that it copies."""

    transfer: Transfer
    pairs: list[_Pair]


class HostFlights:
    """Makes transfers of moves, and keeps them until they have landed."""

    def __init__(self, books: HostBooks, cost: OffloadCost) -> None:
        self._books = books
        self._cost = cost
        self._flights: dict[int, Flight] = {}
        self._next_number = 1
        self.queued = {Direction.OUT: 0, Direction.IN: 0}  # bytes

    def __len__(self) -> int:
        return len(self._flights)

    def start(self, direction: Direction, moves: Iterator[Move]) -> list[Transfer]:
        """Transfers of as many of ``moves`` as should be under way now; those that are left are not asked for."""
        limit = self._cost.queue_bytes(direction)
        unit = self._cost.link.bytes_in(direction, _UNIT_NS)
        planned: list[Transfer] = []
        group, pairs, num_bytes = -1, list[_Pair](), 0
        while self.queued[direction] < limit:
            move = next(moves, None)
            if move is None:
                break
            if pairs and (move[0] != group or num_bytes >= unit):
                planned.append(self._depart(direction, group, pairs))
                pairs, num_bytes = [], 0
            group, source, target = move
            source.in_transfer = target.in_transfer = True
            self._books.pools[group].settle(source)
            pairs.append((source, target))
            size = self._books.size(group, source)
            num_bytes += size
            self.queued[direction] += size
        if pairs:
            planned.append(self._depart(direction, group, pairs))
        return planned

    def _depart(self, direction: Direction, group: int, pairs: list[_Pair]) -> Transfer:
        rows = tuple(
            (source.offset * OFFSET_UNIT, target.offset * OFFSET_UNIT, self._books.size(group, source))
            for source, target in pairs
        )
        transfer = Transfer(self._next_number, direction, group, rows)
        self._next_number += 1
        self._flights[transfer.number] = Flight(transfer, pairs)
        return transfer

    def end(self, number: int) -> Flight | None:
        """A transfer is over, well or not; None for an unknown number."""
        flight = self._flights.pop(number, None)
        if flight is not None:
            self.queued[flight.transfer.direction] -= flight.transfer.num_bytes
        return flight

    def leaving_bytes(self, group: int) -> int:
        """Bytes of a group that are on their way to the host."""
        return sum(
            flight.transfer.num_bytes
            for flight in self._flights.values()
            if flight.transfer.direction is Direction.OUT and flight.transfer.group == group
        )

    def pinned(self, group: int) -> set[tuple[int, int]]:
        """(tier, offset) of all blocks of a group that are being copied."""
        flights = (flight for flight in self._flights.values() if flight.transfer.group == group)
        return {(block.tier, block.offset) for flight in flights for pair in flight.pairs for block in pair}
