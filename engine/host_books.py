"""Names of blocks and room in both memory tiers: who needs a block on the device, and where it is to go. No torch.

A table or prefix node names the block on the device where there is one, else the one on the host. A block that is
coming in has its *target* on the device reserved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from engine.block_pool import BlockPool
from engine.cache_sequence import CacheSequence
from engine.formats import OFFSET_UNIT
from engine.memory_model import token_bytes
from engine.pool_block import DEVICE, HOST, Block
from engine.prefix_cache import PrefixCache
from engine.recoder import Recoder
from engine.versions import Versions

Move = tuple[int, Block, Block]  # group, source, target


class HostBooks:
    """What all parts of the host tier share; all lists go by layer group. ``sequences`` are the manager's, by serial.

    ``targets``: by the source's offset on the host.
    """

    def __init__(
        self,
        pools: Sequence[BlockPool],
        recoders: Sequence[Recoder],
        prefix: PrefixCache,
        sequences: Mapping[int, CacheSequence],
        versions: Versions,
    ) -> None:
        self.pools = pools
        self.hosts = [pool.host for pool in pools if pool.host is not None]
        self.recoders = recoders
        self.sequences = sequences
        self.targets: list[dict[int, Block]] = [{} for _ in pools]
        self._prefix = prefix
        self._versions = versions

    # -- who needs what -------------------------------------------------------------------------------------------

    def is_dispensable(self, group: int, block: Block) -> bool:
        """Whether all that hold a block are parked, or may have it on the host while they run."""
        if not block.holders:
            return False
        for holder in block.holders:
            sequence = self.sequences[holder]
            if not sequence.is_parked and block.end > sequence.host_below[group]:
                return False
        return True

    def grows(self, group: int, block: Block) -> bool:
        """Whether a sequence that is not parked may still write to a block."""
        if block.is_sealed:
            return False
        for serial in block.holders:
            sequence = self.sequences[serial]
            table = sequence.tables[group]
            if not sequence.is_parked and table.blocks[-1] is block and table.stops[-1] == block.end:
                return True
        return False

    # -- names ----------------------------------------------------------------------------------------------------

    def rename(self, group: int, old: Block, new: Block) -> None:
        """Everybody who names ``old`` names its copy ``new`` from now on."""
        self.pools[group].take_place(new, old)
        for serial in list(old.holders):
            table = self.sequences[serial].tables[group]
            index = table.index_from(old.first)
            table.replace(index, index + 1, (new,), (table.stops[index],), self._versions.next())
            del old.holders[serial]
            new.holders[serial] = None
        self._prefix.move(old, (new,), group)

    def demote(self, group: int, block: Block) -> None:
        """Free a device block that has a twin, which takes its place."""
        shadow = block.twin
        if shadow is None:
            return
        self.rename(group, block, shadow)
        self.pools[group].unlink(block)
        self.pools[group].settle(block)

    def expect(self, group: int, source: Block, target: Block) -> None:
        """``target`` is kept for what comes from ``source``."""
        target.in_transfer = True
        self.targets[group][source.offset] = target

    def expect_no_more(self, moves: Iterable[Move]) -> None:
        """Give targets back whose sources will not be sent for."""
        for group, source, target in moves:
            del self.targets[group][source.offset]
            target.in_transfer = False
            self.pools[group].settle(target)

    # -- room -----------------------------------------------------------------------------------------------------

    def size(self, group: int, block: Block) -> int:
        """Bytes of a block."""
        return self.pools[group].arena.block_bytes(block.block_class)

    def spare_bytes(self, group: int) -> int:
        """Bytes that requests could have without losing anything, as far as new tokens could go there: not where slots
        lie scattered in other classes.
        """
        pool = self.pools[group]
        tokens = pool.room.available_tokens(self.recoders[group].targets.write_size())
        return min(_cheap_bytes(pool), int(tokens * token_bytes(pool.arena.shape)))

    def host_room_bytes(self, group: int) -> int:
        """Bytes that the host could take, cached ones given up."""
        host = self.hosts[group]
        return total_bytes(host) - host.resident_bytes + host.idle.num_bytes

    def host_version(self) -> int:
        """Changes whenever room on the host may have appeared."""
        return sum(host.version for host in self.hosts)

    def bytes_to_load(self, group: int, blocks: Iterable[Block]) -> int:
        """Room on the device that blocks need which lie on the host and are not on their way."""
        targets = self.targets[group]
        return sum(self.size(group, b) for b in blocks if b.tier == HOST and b.offset not in targets)

    def own_bytes(self, group: int, sequence: CacheSequence) -> int:
        """Bytes that parking a sequence would copy."""
        return sum(
            self.size(group, block)
            for block in sequence.tables[group].blocks
            if block.tier == DEVICE and block.twin is None and len(block.holders) == 1
        )


def total_bytes(pool: BlockPool) -> int:
    """Bytes of a pool's slabs."""
    return pool.arena.num_slabs * pool.arena.slab_units * OFFSET_UNIT


def _cheap_bytes(pool: BlockPool) -> int:
    """Bytes of a device pool that requests could have without losing anything."""
    reserve = pool.reserve_slabs * pool.arena.slab_units * OFFSET_UNIT
    return total_bytes(pool) - reserve - pool.resident_bytes + pool.idle.num_bytes - pool.unshadowed_bytes
