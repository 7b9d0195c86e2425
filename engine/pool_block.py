"""One block of KV as bookkeeping sees it. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.formats import BlockClass


@dataclass(slots=True, eq=False)
class Block:
    """One block. ``filled``: tokens whose KV is committed, in whole chunks or to the end of its writer.

    ``holders``: ids of sequences whose table has it. ``nodes``: prefix-cache node by absolute chunk position.
    """

    offset: int
    block_class: BlockClass
    first: int
    filled: int = 0
    holders: dict[int, None] = field(default_factory=dict)
    nodes: dict[int, int] = field(default_factory=dict)
    last_used: int = 0
    in_recode: bool = False
    is_stale: bool = False

    @property
    def size(self) -> int:
        return self.block_class.block_size

    @property
    def end(self) -> int:
        return self.first + self.block_class[1]

    @property
    def is_sealed(self) -> bool:
        """Full: its bytes never change again."""
        return self.filled >= self.block_class.block_size
