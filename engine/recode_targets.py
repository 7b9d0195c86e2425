"""Which class the blocks of one group should have under the settings in force, and since when. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from engine.cache_sequence import CacheSequence, CacheSettings
from engine.formats import FORMATS, NATIVE, BlockClass, lossiness_of, part_size
from engine.pool_block import Block

_BY_LOSSINESS = {kind.lossiness: kind for kind in FORMATS}


class RecodeTargets:
    """``sequences`` (by serial) is shared with the manager. ``lossiest``: the lossiest format that the group allows
    (None: any).
    """

    def __init__(
        self,
        sequences: Mapping[int, CacheSequence],
        settings: CacheSettings,
        *,
        recent_tokens: int,
        lossiest: str | None = None,
    ) -> None:
        self.sequences = sequences
        self.recent_tokens = recent_tokens
        self.max_lossiness = lossiness_of(lossiest)
        self.num_floored = 0  # sequences with a floor: without any, holders need not be asked
        self._targets: dict[BlockClass, BlockClass] = {}  # under these settings, for blocks that no floor protects
        self.use(settings)

    def use(self, settings: CacheSettings) -> None:
        """Settings in force, and what follows from them for sequences without a floor: ``span``, the tokens that are
        converted at a time, and ``last_class``, which a native block ends in.
        """
        self.settings = settings
        self._lossiness = min(settings.lossiness, self.max_lossiness)
        self._part_size = part_size(settings.block_size)
        self.span = max(self.write_size(), _BY_LOSSINESS[self._lossiness].tile_tokens)
        self.last_class = self._target_of(BlockClass(NATIVE.name, settings.block_size), self._lossiness)
        self._targets.clear()

    def target_class(self, block: Block) -> BlockClass:
        """The class that a block should have, whatever its neighbours and what is kept of it allow."""
        if self.num_floored and block.holders:
            floor = min(self.sequences[holder].max_lossiness for holder in block.holders)
            return self._target_of(block.block_class, min(self._lossiness, floor))
        return self.unheld_target(block.block_class)

    def unheld_target(self, block_class: BlockClass) -> BlockClass:
        """The same for blocks of a class that no sequence with a floor holds."""
        target = self._targets.get(block_class)
        if target is None:
            target = self._targets[block_class] = self._target_of(block_class, self._lossiness)
        return target

    def _target_of(self, block_class: BlockClass, lossiness: int) -> BlockClass:
        kind = _BY_LOSSINESS[max(lossiness, block_class.lossiness)]
        return BlockClass(kind.name, max(self.settings.block_size, kind.tile_tokens))

    def tile_tokens(self, sequence: CacheSequence) -> int:
        """Tokens of a tile of the format that a sequence's blocks are converted to."""
        return _BY_LOSSINESS[min(self._lossiness, sequence.max_lossiness)].tile_tokens

    def write_size(self, max_lossiness: int | None = None) -> int:
        """Size of the native blocks that new tokens of a sequence with this floor (None: without one) go to.

        A quarter of a block where they will be quantised, so that what is old of a block that is not full need not wait
        for the rest.
        """
        return self._part_size if self._lossiness and max_lossiness != 0 else self.settings.block_size

    def is_due(self, block: Block) -> bool:
        """Whether something is left to do for a sealed block, and no reason to wait."""
        target = self.target_class(block)
        return target != block.block_class and self.is_old(block) and not self.waits(block, target)

    def is_old(self, block: Block) -> bool:
        """Whether every holder has left it more than ``recent_tokens`` behind."""
        limit = block.end + self.recent_tokens
        return all(self.sequences[holder].committed >= limit for holder in block.holders)

    def waits(self, block: Block, target: BlockClass) -> bool:
        """Whether nothing is left to do but to merge it, and its span may still fill up: its last part merges all."""
        is_part = block.size < target.block_size and block.block_class.kv_format == target.kv_format
        return is_part and not self.is_span_past(block, target.block_size)

    def is_span_past(self, block: Block, size: int) -> bool:
        """Whether no holder will come to fill the span. Pins never grow."""
        limit = (block.first // size + 1) * size + self.recent_tokens
        return all(holder < 0 or self.sequences[holder].committed >= limit for holder in block.holders)
