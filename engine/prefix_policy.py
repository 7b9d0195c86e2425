"""Who goes first among cached blocks that nobody holds: one class per value of ``prefix_eviction``. No torch.

A policy gives a block its *priority* when its last holder lets go; lower ones go first, among equals the longer unused.
``lfu`` and ``cost`` are greedy-dual (Young 1994; with sizes and frequencies, Cherkasova 1998): priority is level plus
worth, where the level is the highest priority given up so far, so that what is not used again is overtaken in time.
Whatever the policy, a chain goes from its end: see ``is_chained``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Final, Protocol

from engine.arena import Arena
from engine.formats import CHUNK_TOKENS, NATIVE, BlockClass
from engine.pool_block import Block
from engine.prefix_cache import PrefixCache


def parity_tokens(hidden_size: int) -> int:
    """Position from which on attention costs more than all else of a token: 24 h^2 operations in the weights of a
    usual layer against 4 h per token attended, for a hidden state of h channels.
    """
    return 6 * hidden_size


DEFAULT_PARITY_TOKENS: Final = parity_tokens(4096)


class PrefixPolicy(Protocol):
    """The order in which the idle blocks of one pool are given up.

    ``is_chained``: priorities need not fall along a prefix, so a block's must be raised to the highest of those cached
    after it; without its start the rest is useless. ``spares_best``: a slab of idle blocks that could be given to
    another class counts as its most valuable block, not as its least valuable one.
    """

    name: str
    is_chained: bool
    spares_best: bool

    def priority(self, block: Block) -> float:
        """What a cached block is worth that has just lost its last holder. Comparable within one policy object."""
        ...

    def gave_up(self, priority: float) -> None:
        """A block of this priority went."""
        ...


class Lru:
    """Least recently used first."""

    name = "lru"
    is_chained = False  # whoever uses the end of a prefix uses its start, and lets go of it later
    spares_best = False

    def priority(self, block: Block) -> float:
        return float(block.last_used)

    def gave_up(self, priority: float) -> None:
        """Nothing ages but by use."""


class _GreedyDual(ABC):
    """The level that all blocks age by."""

    is_chained = True
    # A slab goes whole. Giving it to another class loses its best block, while what else it would have made room for
    # finds room later; judged by its least valuable block, one cold block would cost all the hot ones beside it.
    spares_best = True

    def __init__(self) -> None:
        self._level = 0.0

    def priority(self, block: Block) -> float:
        return self._level + self._worth(block)

    def gave_up(self, priority: float) -> None:
        self._level = max(self._level, priority)

    @abstractmethod
    def _worth(self, block: Block) -> float:
        """What a block is worth beside the level."""


class Lfu(_GreedyDual):
    """Least frequently used first; uses fade (see ``engine.popularity``)."""

    name = "lfu"

    def __init__(self, prefix: PrefixCache) -> None:
        super().__init__()
        self._prefix = prefix

    def _worth(self, block: Block) -> float:
        return self._prefix.score(block)


class Cost(_GreedyDual):
    """Least recomputation saved per byte first.

    A token at position p costs 1 + p / ``parity_tokens`` to compute, in units of what it costs without attention:
    see :func:`parity_tokens`. Bytes are those of the block's class, so 4-bit KV is worth more than native.

    The saving per byte counts with its square root: where the chance of reuse falls with the square of the idle time,
    the sum saved is largest if a block is kept for a time that grows with the square root of what it would save.
    """

    name = "cost"

    def __init__(self, prefix: PrefixCache, arena: Arena, window: int | None, parity_tokens: int) -> None:
        super().__init__()
        self._prefix = prefix
        self._arena = arena
        self._window = math.inf if window is None else window
        self._parity = parity_tokens

    def _worth(self, block: Block) -> float:
        # Chunks that nobody filled save nothing.
        scores = sum(self._prefix.scores(block)) * CHUNK_TOKENS / block.size
        attended = min(block.first + block.size / 2, self._window)
        native = self._arena.block_bytes(BlockClass(NATIVE.name, block.size))
        per_byte = native / self._arena.block_bytes(block.block_class)
        return scores * math.sqrt((1 + attended / self._parity) * per_byte)


def make_policy(
    name: str, prefix: PrefixCache, arena: Arena, window: int | None, parity_tokens: int = DEFAULT_PARITY_TOKENS
) -> PrefixPolicy:
    """A fresh policy for one group's pool. Raises ValueError for an unknown name or ``parity_tokens`` < 1."""
    if parity_tokens < 1:
        raise ValueError(f"attention costs as much as all else from some token on, got {parity_tokens}")
    if name == Lru.name:
        return Lru()
    if name == Lfu.name:
        return Lfu(prefix)
    if name == Cost.name:
        return Cost(prefix, arena, window, parity_tokens)
    raise ValueError(f"prefix_eviction {name!r} is not offered; choose one of lru, lfu, cost")
