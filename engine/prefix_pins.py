"""Prefixes that stay cached for a while although nobody runs with them. No torch.

A pin is a sequence that never grows: it stands on the prefix cache's node and holds, in every group, the blocks that a
hit on the prefix would take. So its blocks are shared, recoded and audited like any other sequence's. What all pins
hold together is capped; beyond that a request runs unpinned, which is counted. A pin ends when nobody has used the
whole of its prefix for its time to live, when an operator ends it, or when a request that runs alone needs the room.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from engine.block_pool import BlockPool
from engine.block_table import BlockTable
from engine.cache_sequence import CacheSequence
from engine.clock import Clock
from engine.pool_block import DEVICE, Block
from engine.prefix_cache import PrefixCache
from engine.prefix_hits import Match
from engine.recoder import Recoder
from engine.stats import Counters
from engine.versions import Versions

MAX_TTL_S: Final = 7 * 86_400.0
DEFAULT_SHARE: Final = 0.25


@dataclass(eq=False)
class Pin:
    """One pinned prefix of ``num_tokens``, as asked for by ``request_id``. ``tip``: its last node."""

    pin_id: int
    request_id: str
    tip: int
    num_tokens: int
    ttl_ns: int
    expires_ns: int
    sequence: CacheSequence


class PrefixPins:
    """All pins of one cache. ``sequences`` by serial is shared with the manager: pins are entered in it."""

    def __init__(
        self,
        prefix: PrefixCache,
        pools: Sequence[BlockPool],
        recoders: Sequence[Recoder],
        sequences: MutableMapping[int, CacheSequence],
        versions: Versions,
        *,
        max_bytes: int,
        clock: Clock,
        counters: Counters,
    ) -> None:
        self.max_bytes = max_bytes
        self._prefix = prefix
        self._pools = pools
        self._recoders = recoders
        self._sequences = sequences
        self._versions = versions
        self._clock = clock
        self._counters = counters
        self._next_id = 1
        self._by_id: dict[int, Pin] = {}
        self._by_tip: dict[int, Pin] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def pin(self, request_id: str, match: Match, ttl_s: float, max_lossiness: int) -> bool:
        """Pin what a match found, or renew its pin; pins of shorter prefixes that end no later are taken over.

        False, and counted, when the cap leaves no room for it.
        """
        if not match.num_tokens:
            return False
        ttl_ns = round(ttl_s * 1e9)
        expires_ns = self._clock.now_ns() + ttl_ns
        known = self._by_tip.get(match.node)
        if known is not None and known.sequence.max_lossiness == max_lossiness:
            known.ttl_ns, known.expires_ns = max(ttl_ns, known.ttl_ns), max(expires_ns, known.expires_ns)
            return True
        if self.num_bytes() + self._added_bytes(match) > self.max_bytes:
            self._counters.prefix_pins_refused += 1
            return False
        found = [self._by_tip[node] for node in self._prefix.path_to(match.node) if node in self._by_tip]
        self._counters.prefix_pins_made += 1
        self._hold(request_id, match, ttl_ns, expires_ns, max_lossiness)
        for shorter in found:
            if shorter.expires_ns <= expires_ns or shorter is known:
                self._end(shorter)
        return True

    def renew(self, node: int) -> None:
        """A request takes up, or lets go of, the prefix that ends with this node and all that it begins with."""
        if not self._by_tip:
            return
        for tip in list(self._prefix.path_to(node)):
            pin = self._by_tip.get(tip)
            if pin is None:
                continue
            pin.expires_ns = self._clock.now_ns() + pin.ttl_ns
            if any(not block.nodes for table in pin.sequence.tables for block in table.blocks):
                self._replace(pin)

    def expire(self) -> None:
        """End the pins whose time is over. It does not run while a request holds the end of the prefix."""
        if self._by_id:
            now_ns = self._clock.now_ns()
            for pin in [pin for pin in self._by_id.values() if pin.expires_ns <= now_ns]:
                # A table is empty where the model's window is 1.
                ends = [block for table in pin.sequence.tables for block in table.blocks[-1:]]
                if any(holder > 0 for block in ends for holder in block.holders):
                    pin.expires_ns = now_ns + pin.ttl_ns
                else:
                    self._end(pin)

    def unpin(self, pin_id: int | None = None) -> int:
        """End one pin, or all; returns how many that were."""
        pins = list(self._by_id.values()) if pin_id is None else [p for p in (self._by_id.get(pin_id),) if p]
        for pin in pins:
            self._end(pin)
        return len(pins)

    def give_way(self) -> bool:
        """End the pin that would end first, for a request that runs alone; False when there is none."""
        pin = min(self._by_id.values(), key=lambda pin: (pin.expires_ns, pin.pin_id), default=None)
        if pin is None:
            return False
        self._counters.prefix_pins_broken += 1
        self._end(pin)
        return True

    # -- readings -------------------------------------------------------------------------------------------------

    def num_bytes(self) -> int:
        """Bytes of blocks that pins hold, each counted once. O(pinned blocks)."""
        return sum(self._bytes(group, block) for group, block in self._held())

    def idle_bytes(self) -> list[int]:
        """Per group: bytes of blocks on the device that nobody but pins holds. O(pinned blocks)."""
        found = [0] * len(self._pools)
        for group, block in self._held():
            if block.tier == DEVICE and all(holder < 0 for holder in block.holders):
                found[group] += self._bytes(group, block)
        return found

    def to_json(self) -> list[dict[str, Any]]:
        """One row per pin, soonest to end first."""
        now_ns = self._clock.now_ns()
        return [
            {
                "id": pin.pin_id,
                "request_id": pin.request_id,
                "num_tokens": pin.num_tokens,
                "bytes": sum(
                    self._bytes(group, block)
                    for group, table in enumerate(pin.sequence.tables)
                    for block in table.blocks
                ),
                "ttl_s": pin.ttl_ns / 1e9,
                "expires_in_s": max(0, pin.expires_ns - now_ns) / 1e9,
            }
            for pin in sorted(self._by_id.values(), key=lambda pin: (pin.expires_ns, pin.pin_id))
        ]

    def _held(self) -> list[tuple[int, Block]]:
        found: dict[Block, int] = {}
        for pin in self._by_id.values():
            for group, table in enumerate(pin.sequence.tables):
                for block in table.blocks:
                    found[block] = group
        return [(group, block) for block, group in found.items()]

    def _added_bytes(self, match: Match) -> int:
        return sum(
            self._bytes(group, block)
            for group, run in enumerate(match.runs)
            for block, _ in run
            if all(holder >= 0 for holder in block.holders)
        )

    def _bytes(self, group: int, block: Block) -> int:
        return self._pools[group].arena.block_bytes(block.block_class)

    # -- holding --------------------------------------------------------------------------------------------------

    def _hold(self, request_id: str, match: Match, ttl_ns: int, expires_ns: int, max_lossiness: int) -> None:
        pin_id = self._next_id
        self._next_id += 1
        tables = [BlockTable(self._versions.next()) for _ in self._pools]
        sequence = CacheSequence(
            -pin_id,
            f"pin {pin_id}",
            max_lossiness,
            False,
            True,
            tables,
            frontier=[0] * len(self._pools),
            dropped=[0] * len(self._pools),
        )
        self._sequences[sequence.serial] = sequence
        for group, run in enumerate(match.runs):
            self._recoders[group].targets.num_floored += sequence.is_floored
            for block, stop in run:
                tables[group].append(block, stop, self._versions.next())
                self._pools[group].hold(block, sequence.serial)
        count = match.num_tokens
        sequence.committed = sequence.end = sequence.capacity = sequence.chained = count
        sequence.lossiest, sequence.node = match.lossiness, match.node
        self._prefix.retain(match.node)
        pin = Pin(pin_id, request_id, match.node, count, ttl_ns, expires_ns, sequence)
        self._by_id[pin_id] = self._by_tip[match.node] = pin

    def _end(self, pin: Pin) -> None:
        del self._by_id[pin.pin_id]
        if self._by_tip.get(pin.tip) is pin:
            del self._by_tip[pin.tip]
        del self._sequences[pin.sequence.serial]
        self._prefix.release(pin.tip)
        for pool, recoder, table in zip(self._pools, self._recoders, pin.sequence.tables, strict=True):
            recoder.targets.num_floored -= pin.sequence.is_floored
            for block in reversed(table.blocks):
                pool.unpin(block, pin.sequence.serial)
                if block.holders or block.nodes:
                    recoder.consider(block)

    def _replace(self, pin: Pin) -> None:
        """Some of its blocks are no longer cached, because better ones are: hold those instead."""
        path = list(self._prefix.path_to(pin.tip))[::-1]
        match = self._prefix.match_path(path, pin.sequence.max_lossiness)
        self._prefix.retain(pin.tip)
        self._end(pin)
        if match.num_tokens and self.num_bytes() + self._added_bytes(match) <= self.max_bytes:
            self._hold(pin.request_id, match, pin.ttl_ns, pin.expires_ns, pin.sequence.max_lossiness)
        self._prefix.release(pin.tip)
