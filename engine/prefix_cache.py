"""Which cached blocks hold the KV of a given token prefix. No torch.

Every whole chunk of 16 tokens is a *node*, found under (parent node, its 16 tokens): a hash chain whose links are
unique serials instead of hashes, so that the dictionary compares all tokens on every hit and two prefixes can never be
mistaken for each other. A salt picks the root. The chain is the same for all layer groups and block sizes; per group a
node names the block that holds its KV, and the *ancestry*: the lossiest format that its KV was computed over.
With full attention a chunk is of no use without all that come before it, so what follows a block goes with it.
(Ideas: vLLM's chained block hashes, SGLang's radix tree, cut to the one granularity that all block sizes share.)
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from engine.arena import IntegrityError
from engine.formats import CHUNK_TOKENS
from engine.pool_block import HOST, Block
from engine.popularity import Popularity

NodeKey = tuple[int, tuple[int, ...] | str]


@dataclass(slots=True, eq=False)
class Node:
    """One chunk at one place in one prefix. ``uses``: child nodes and sequences that stand on it.

    ``position``: of its first token (a root: 16 before the first). ``score``, ``scored``: see engine.popularity.
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


@dataclass
class Match:
    """A usable prefix: ``num_tokens``, its last node, the lossiest KV in it, and per group (block, end position)."""

    num_tokens: int = 0
    node: int = 0
    lossiness: int = 0
    runs: list[list[tuple[Block, int]]] = field(default_factory=list)


class PrefixCache:
    """The chain of chunks. ``windows``: per group the model's attention window, or None.

    Holds no blocks alive: a block is told that it is cached (``Block.nodes``), and ``forget`` takes it out.
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
            score = self.popularity.recall(digest)
            self.nodes[node] = Node(key, [None] * width, [0] * width, position, digest, *score)
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
        while node:
            state = self.nodes[node]
            if state.uses or any(block is not None for block in state.blocks):
                return
            del self.nodes[node]
            del self._ids[state.key]
            self.popularity.remember(state.digest, state.score, state.scored)
            child, node = node, state.key[0]
            if node:
                self.nodes[node].uses -= 1
                del self.nodes[node].children[child]

    # -- what blocks hold -----------------------------------------------------------------------------------------

    def put(self, node: int, group: int, block: Block, position: int, ancestry: int) -> Block | None:
        """The block holds this chunk's KV, computed over ``ancestry``; returns the block that it displaces, if any.

        What is cached already stays, unless the new KV is less lossy, stored or computed over, or as good and nearer.
        A chunk whose start is not cached could not be hit and is not entered.
        """
        state = self.nodes[node]
        old = state.blocks[group]
        if old is None and not self._has_start(state, group):
            return None
        if old is not None:
            now = (max(ancestry, block.block_class.lossiness), block.tier)
            if old is block or now >= (max(state.ancestry[group], old.block_class.lossiness), old.tier):
                return None
            del old.nodes[position]
        state.blocks[group] = block
        state.ancestry[group] = ancestry
        block.nodes[position] = node
        return old

    def move(self, source: Block, targets: Sequence[Block], group: int) -> None:
        """A block was converted into others: whatever names it names the one that now holds that position."""
        for position, node in source.nodes.items():
            target = next(t for t in targets if t.first <= position < t.end)
            self.nodes[node].blocks[group] = target
            target.nodes[position] = node
        source.nodes.clear()

    def forget(self, block: Block, group: int) -> list[Block]:
        """Take a block out of the cache, and with it what follows; returns the other blocks that are out of it now."""
        nodes = list(block.nodes.values())
        block.nodes.clear()
        for node in nodes:
            self.nodes[node].blocks[group] = None
        orphans: dict[Block, None] = {}
        if self.windows[group] is None:
            below = [child for node in nodes for child in self.nodes[node].children]
            while below:
                node = below.pop()
                state = self.nodes[node]
                orphan = state.blocks[group]
                if orphan is not None:
                    state.blocks[group] = None
                    del orphan.nodes[state.position]
                    orphans[orphan] = None
                    below += state.children
                    nodes.append(node)
        for node in nodes:
            if node in self.nodes:
                self._prune(node)
        return [orphan for orphan in orphans if not orphan.nodes]

    def _has_start(self, state: Node, group: int) -> bool:
        """Whether what comes before a chunk is cached as far as a hit on it needs that."""
        parent = state.key[0]
        above = self.nodes[parent]
        return self.windows[group] is not None or above.position < 0 or above.blocks[group] is not None

    def previous(self, block: Block, group: int) -> Block | None:
        """The cached block that holds the KV just before a cached block's first token, if it ends there."""
        node = block.nodes.get(block.first)
        parent = self.nodes[self.nodes[node].key[0]] if node is not None and block.first else None
        before = parent.blocks[group] if parent is not None else None
        return before if before is not None and before.end == block.first else None

    def before(self, block: Block, group: int) -> Block | None:
        """The cached block without which a cached block is of no use: that of the chunk before its first cached one."""
        if self.windows[group] is not None or not block.nodes:
            return None
        return self.nodes[self._first(block).key[0]].blocks[group]

    def _first(self, block: Block) -> Node:
        """The first cached chunk of a cached block."""
        node = block.nodes.get(block.first)
        return self.nodes[block.nodes[min(block.nodes)] if node is None else node]

    # -- uses -----------------------------------------------------------------------------------------------------

    def use(self, node: int) -> None:
        """A request computes this chunk, or takes it up."""
        state = self.nodes[node]
        state.score, state.scored = self.popularity.raised(state.score, state.scored)

    def path_to(self, node: int) -> Iterator[int]:
        """A node and those before it, last first, without the root."""
        while node and self.nodes[node].key[0]:
            yield node
            node = self.nodes[node].key[0]

    def score(self, block: Block) -> float:
        """How often a cached block was used, faded: the score of its first cached chunk."""
        state = self._first(block)
        return self.popularity.faded(state.score, state.scored)

    def scores(self, block: Block) -> Iterator[float]:
        """The scores of a block's cached chunks."""
        for node in block.nodes.values():
            state = self.nodes[node]
            yield self.popularity.faded(state.score, state.scored)

    # -- hits -----------------------------------------------------------------------------------------------------

    def match(self, ids: Sequence[int], salt: str, max_lossiness: int, *, max_tier: int = HOST) -> Match:
        """The longest cached prefix of ``ids`` that every group can serve, in whole chunks.

        KV that is stored, or was computed over anything, lossier than ``max_lossiness`` does not count, nor what lies
        farther away than ``max_tier``. Groups with a window need only what the next token attends.
        """
        return self.match_path(self._path(ids, salt), max_lossiness, max_tier=max_tier)

    def match_path(self, path: Sequence[int], max_lossiness: int, *, max_tier: int = HOST) -> Match:
        """The same for chunks that are known by their nodes, first one first."""
        limits = (max_lossiness, max_tier)
        best = self._longest(path, limits)
        match = Match(best * CHUNK_TOKENS, node=path[best - 1] if best else 0)
        for group in range(len(self.windows)):
            run = self._run(path[:best], group, limits) if best else []
            match.runs.append(run)
            for block, _ in run:
                match.lossiness = max(match.lossiness, block.block_class.lossiness)
            for node in path[:best]:
                if self._usable(node, group, limits) is not None:
                    match.lossiness = max(match.lossiness, self.nodes[node].ancestry[group])
        return match

    def _path(self, ids: Sequence[int], salt: str) -> list[int]:
        path: list[int] = []
        node = self._ids.get((0, salt))
        for start in range(0, len(ids) - CHUNK_TOKENS + 1, CHUNK_TOKENS):
            if node is None:
                break
            node = self._ids.get((node, tuple(ids[start : start + CHUNK_TOKENS])))
            if node is not None:
                path.append(node)
        return path

    def _usable(self, node: int, group: int, limits: tuple[int, int]) -> Block | None:
        state = self.nodes[node]
        block = state.blocks[group]
        if block is None or block.tier > limits[1]:
            return None
        return block if max(state.ancestry[group], block.block_class.lossiness) <= limits[0] else None

    def _longest(self, path: Sequence[int], limits: tuple[int, int]) -> int:
        """How many nodes of the path every group can serve."""
        best = 0
        starts: list[int | None] = [None] * len(self.windows)  # where each group's unbroken KV begins
        lasts: list[Block | None] = [None] * len(self.windows)
        for index, node in enumerate(path):
            served = True
            for group, window in enumerate(self.windows):
                block = self._usable(node, group, limits)
                start = starts[group]
                if block is None:
                    start = None
                elif start is None or (block is not lasts[group] and block.first < start):
                    start = block.first
                starts[group], lasts[group] = start, block
                if window is None and start != 0:
                    return best
                needed = 0 if window is None else max(0, (index + 1) * CHUNK_TOKENS - window + 1)
                served = served and start is not None and start <= needed
            if served:
                best = index + 1
        return best

    def _run(self, path: Sequence[int], group: int, limits: tuple[int, int]) -> list[tuple[Block, int]]:
        """The blocks, and up to where each is used, of the unbroken KV that ends with the path.

        A block reached in its middle serves its earlier chunks as well: what it holds there is the same prefix.
        """
        run: list[tuple[Block, int]] = []
        for index, node in enumerate(path):
            position = index * CHUNK_TOKENS
            block = self._usable(node, group, limits)
            if block is None:
                run.clear()
                continue
            if run and run[-1][0] is block:
                run[-1] = (block, position + CHUNK_TOKENS)
                continue
            while run and run[-1][0].first >= block.first:
                run.pop()
            if run:
                run[-1] = (run[-1][0], block.first)
            run.append((block, position + CHUNK_TOKENS))
        window = self.windows[group]
        needed = 0 if window is None else max(0, len(path) * CHUNK_TOKENS - window + 1)
        return [(block, stop) for block, stop in run if stop > needed]

    # -- audit ----------------------------------------------------------------------------------------------------

    def check_integrity(self, tips: Sequence[int]) -> None:
        """Raises IntegrityError unless links, uses and blocks agree; ``tips``: the nodes that sequences stand on."""
        uses: dict[int, int] = {}
        for node in self.nodes.values():
            uses[node.key[0]] = uses.get(node.key[0], 0) + 1
        for tip in tips:
            uses[tip] = uses.get(tip, 0) + 1
        for node_id, node in self.nodes.items():
            if self._ids.get(node.key) != node_id or (node.key[0] and node.key[0] not in self.nodes):
                raise IntegrityError(f"prefix node {node_id} is not linked")
            if node.uses != uses.get(node_id, 0):
                raise IntegrityError(f"prefix node {node_id}: {node.uses} uses counted, {uses.get(node_id, 0)} found")
            if not node.uses and all(block is None for block in node.blocks):
                raise IntegrityError(f"prefix node {node_id} is useless and not pruned")
            for group, block in enumerate(node.blocks):
                if block is None:
                    continue
                if block.nodes.get(node.position) != node_id:
                    raise IntegrityError(f"prefix node {node_id} names block {block.offset}, which does not know")
                if not self._has_start(node, group):
                    raise IntegrityError(f"prefix node {node_id} outlived its start in group {group}")
            children = {child for child in node.children if self.nodes[child].key[0] == node_id}
            if len(children) != len(node.children) or len(children) > node.uses:
                raise IntegrityError(f"prefix node {node_id} has children that are not its own")
        if len(self._ids) != len(self.nodes):
            raise IntegrityError("prefix index and nodes differ in number")
