"""What converts as a whole: adjacent blocks and those that take their place. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from engine.plan import RecodeJob
from engine.pool_block import Block


@dataclass(frozen=True, eq=False)
class RecodeUnit:
    """Sources, adjacent and in order, and the targets that replace them: at the same positions, without those that
    nobody keeps.

    ``marks``: of the holders of sources that still grow, serial, tokens computed and slots when this was planned.
    """

    sources: tuple[Block, ...]
    targets: tuple[Block, ...]
    marks: tuple[tuple[int, int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(block.size for block in self.sources)

    @property
    def is_move(self) -> bool:
        """Whether one block goes elsewhere as it is."""
        is_one = len(self.sources) == len(self.targets) == 1
        return is_one and self.sources[0].block_class == self.targets[0].block_class

    def jobs(self) -> list[RecodeJob]:
        """One row per target tile, columns as in kernels.layout.JOB_*."""
        rows: list[RecodeJob] = []
        for target in self.targets:
            kind = target.block_class.format
            for tile in range(target.size // kind.tile_tokens):
                position = target.first + tile * kind.tile_tokens
                source, source_tile = self._tile_at(position)
                second_offset = second_tile = -1
                if source.block_class.format.tile_tokens < kind.tile_tokens:
                    second, second_tile = self._tile_at(position + source.block_class.format.tile_tokens)
                    second_offset = second.offset
                code = source.block_class.format.code
                rows.append(
                    (kind.code, target.offset, tile, code, source.offset, source_tile, second_offset, second_tile)
                )
        return rows

    def _tile_at(self, position: int) -> tuple[Block, int]:
        block = next(source for source in self.sources if source.first <= position < source.end)
        return block, (position - block.first) // block.block_class.format.tile_tokens
