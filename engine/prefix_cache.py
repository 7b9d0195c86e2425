"""Which cached blocks hold the KV of a given token prefix. No torch.

A chain of chunks (:mod:`engine.prefix_nodes`); per layer group a chunk names the block that holds its KV, and the
*ancestry*: the lossiest format that its KV was computed over. With full attention a chunk is of no use without all that
come before it, so what follows a block goes with it. (Ideas: vLLM's chained block hashes, SGLang's radix tree, cut to
the one granularity that all block sizes share.)
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.arena import IntegrityError
from engine.pool_block import Block
from engine.prefix_hits import PrefixHits
from engine.prefix_nodes import Node


class PrefixCache(PrefixHits):
    """The chain of chunks and the blocks that it names. What a prompt finds there: :mod:`engine.prefix_hits`.

    Holds no blocks alive: a block is told that it is cached (``Block.nodes``), and ``forget`` takes it out.
    """

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
        known, nodes, below = self.nodes, list(block.nodes.values()), list[int]()
        block.nodes.clear()
        for node in nodes:
            state = known[node]
            state.blocks[group] = None
            below += state.children
        orphans: dict[Block, None] = {}
        while below and self.windows[group] is None:
            node = below.pop()
            state = known[node]
            orphan = state.blocks[group]
            if orphan is not None:
                state.blocks[group] = None
                del orphan.nodes[state.position]
                orphans[orphan] = None
                below += state.children
                nodes.append(node)
        for node in nodes:
            if node in known:
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
