"""One block of KV as bookkeeping sees it. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.formats import BlockClass

DEVICE, HOST = 0, 1  # tiers


@dataclass(slots=True, eq=False)
class Block:
    """One block. ``filled``: tokens whose KV is committed, in whole chunks or to the end of its writer.

    ``holders``: ids of sequences whose table has it; pins have negative ones. ``nodes``: prefix-cache node by absolute
    chunk position. ``priority``: order in which idle blocks are given up, lowest first, at least ``floor``.
    ``cached_ns``, ``used_ns``: when it was first cached (-1: not yet) and last taken up or let go of.
    ``tier``: 0 on the device, 1 on the host. ``twin``: the block of the other tier with the same bytes, if there is
    one; tables and the prefix cache then name the one on the device. ``in_transfer``: its bytes are being copied from
    it or to it, so it may be read (a source only) but neither written, converted nor reused.
    """

    offset: int
    block_class: BlockClass
    first: int
    filled: int = 0
    holders: dict[int, None] = field(default_factory=dict)
    nodes: dict[int, int] = field(default_factory=dict)
    last_used: int = 0
    priority: float = 0.0
    floor: float = 0.0
    cached_ns: int = -1
    used_ns: int = 0
    was_pinned: bool = False
    in_recode: bool = False
    is_stale: bool = False
    tier: int = DEVICE
    twin: Block | None = field(default=None, repr=False)
    in_transfer: bool = False

    @property
    def is_pinned(self) -> bool:
        """Whether a conversion or a copy needs its storage as it is."""
        return self.in_recode or self.in_transfer

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
