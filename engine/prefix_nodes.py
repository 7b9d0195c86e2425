"""The chain of chunks that a prefix cache consists of, and how often each was used. No torch.

Every whole chunk of 16 tokens is a *node*, found under (parent node, its 16 tokens): a hash chain whose links are
unique serials instead of hashes, so that the dictionary compares all tokens on every hit and two prefixes can never be
mistaken for each other. A salt picks the root. The chain is the same for all layer groups and block sizes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from engine.formats import CHUNK_TOKENS
from engine.pool_block import Block
from engine.popularity import Popularity

NodeKey = tuple[int, tuple[int, ...] | str]


@dataclass(slots=True, eq=False)
class Node:
    """One chunk at one place in one prefix. ``uses``: child nodes and sequences that stand on it.

    ``blocks``, ``ancestry``: per layer group, the block that holds its KV, and the lossiest format that this was
    computed over. ``position``: of its first token (a root: 16 before the first). ``score``, ``scored``: see
    engine.popularity.
    """

    key: NodeKey
    blocks: list[Block | None]
    ancestry: list[int]
    position: int
    digest: int
    score: float
    scored: int
    uses: int = 0
    children: dict[int, None] = field(default_factory=dict)


class PrefixNodes:
    """A part of :class:`engine.prefix_cache.PrefixCache`. ``windows``: per group the model's attention window, or
    None.
    """

    def __init__(self, windows: Sequence[int | None], popularity: Popularity | None = None) -> None:
        self.windows = tuple(windows)
        self.popularity = popularity or Popularity(1)
        self.nodes: dict[int, Node] = {}
        self._ids: dict[NodeKey, int] = {}
        self._next_id = 1

    def root(self, salt: str) -> int:
        """The node before the first token, created on demand."""
        return self._get_or_create((0, salt))

    def child(self, parent: int, tokens: Sequence[int]) -> int:
        """The node of the next 16 tokens after ``parent``, created on demand."""
        return self._get_or_create((parent, tuple(tokens)))

    def _get_or_create(self, key: NodeKey) -> int:
        node = self._ids.get(key)
        if node is None:
            node = self._ids[key] = self._next_id
            self._next_id += 1
            width = len(self.windows)
            parent, tokens = key
            if isinstance(tokens, str):
                position, digest = -CHUNK_TOKENS, zlib.crc32(tokens.encode())
            else:
                above = self.nodes[parent]
                above.uses += 1
                above.children[node] = None
                position, digest = above.position + CHUNK_TOKENS, Popularity.digest(above.digest, tokens)
            score, scored = self.popularity.recall(digest)
            self.nodes[node] = Node(key, [None] * width, [0] * width, position, digest, score, scored)
        return node

    def retain(self, node: int) -> None:
        """A sequence stands on the node: it stays, with or without blocks."""
        self.nodes[node].uses += 1

    def release(self, node: int) -> None:
        """The sequence left the node."""
        self.nodes[node].uses -= 1
        self._prune(node)

    def _prune(self, node: int) -> None:
        """Remove a chain end that nobody uses and that names no block, and what that leaves useless above it."""
        nodes, width = self.nodes, len(self.windows)
        while node:
            state = nodes[node]
            if state.uses or state.blocks.count(None) < width:
                return
            del nodes[node]
            del self._ids[state.key]
            self.popularity.remember(state.digest, state.score, state.scored)
            child, node = node, state.key[0]
            if node:
                above = nodes[node]
                above.uses -= 1
                del above.children[child]

    def path_to(self, node: int) -> Iterator[int]:
        """A node and those before it, last first, without the root."""
        while node and self.nodes[node].key[0]:
            yield node
            node = self.nodes[node].key[0]

    # -- uses -----------------------------------------------------------------------------------------------------

    def use(self, node: int) -> None:
        """A request computes this chunk, or takes it up."""
        state = self.nodes[node]
        state.score, state.scored = self.popularity.raised(state.score, state.scored)

    def score(self, block: Block) -> float:
        """How often a cached block was used, faded: the score of its first cached chunk."""
        state = self._first(block)
        return self.popularity.faded(state.score, state.scored)

    def scores(self, block: Block) -> Iterator[float]:
        """The scores of a block's cached chunks."""
        for node in block.nodes.values():
            state = self.nodes[node]
            yield self.popularity.faded(state.score, state.scored)

    def _first(self, block: Block) -> Node:
        """The first cached chunk of a cached block."""
        node = block.nodes.get(block.first)
        return self.nodes[block.nodes[min(block.nodes)] if node is None else node]
