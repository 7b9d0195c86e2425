"""How much of a prompt the prefix cache can serve, and out of which blocks. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.formats import CHUNK_TOKENS
from engine.pool_block import HOST, Block
from engine.prefix_nodes import PrefixNodes


@dataclass
class Match:
    """A usable prefix: ``num_tokens``, its last node, the lossiest KV in it, and per group (block, end position)."""

    num_tokens: int = 0
    node: int = 0
    lossiness: int = 0
    runs: list[list[tuple[Block, int]]] = field(default_factory=list)


class PrefixHits(PrefixNodes):
    """A part of :class:`engine.prefix_cache.PrefixCache`; changes nothing."""

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
