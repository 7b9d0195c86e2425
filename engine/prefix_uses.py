"""Prefixes that sequences take up from the cache, and what they enter into it. No torch.

What counts as a use of a cached chunk (``prefix_eviction``, reuse gaps): a request takes it up and computes its first
step, or computes it; once per request, however often it is preempted.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.block_lives import DISPLACED, BlockLives
from engine.block_pool import BlockPool
from engine.cache_sequence import CacheSequence
from engine.formats import CHUNK_TOKENS
from engine.host_tier import HostTier
from engine.pool_block import DEVICE, HOST, Block
from engine.prefix_cache import PrefixCache
from engine.prefix_hits import Match
from engine.prefix_pins import PrefixPins
from engine.request import Request
from engine.versions import Versions


class PrefixUses:
    """Between the sequences and the prefix cache of one cache manager, whose parts these are."""

    def __init__(
        self,
        prefix: PrefixCache,
        pools: Sequence[BlockPool],
        pins: PrefixPins,
        tier: HostTier | None,
        *,
        lives: BlockLives,
        versions: Versions,
    ) -> None:
        self._prefix = prefix
        self._pools = pools
        self._pins = pins
        self._tier = tier
        self._lives = lives
        self._versions = versions

    # -- taking up ------------------------------------------------------------------------------------------------

    def match(self, ids: Sequence[int], salt: str, lossiness: int, *, on_device: bool = False) -> Match:
        """The longest prefix of ``ids`` in formats up to ``lossiness``; ``on_device``: without what is on the host."""
        return self._prefix.match(ids, salt, lossiness, max_tier=DEVICE if on_device else HOST)

    def best_match(self, ids: Sequence[int], salt: str, lossiness: int) -> Match:
        """The same, without its part on the host where computing that again would be faster."""
        match = self.match(ids, salt, lossiness)
        tier = self._tier
        if tier is None:
            return match
        num_bytes = sum(tier.bytes_to_load(group, (block for block, _ in run)) for group, run in enumerate(match.runs))
        if not num_bytes:
            return match
        near = self.match(ids, salt, lossiness, on_device=True)
        return match if tier.load_pays(num_bytes, match.num_tokens - near.num_tokens) else near

    def take_up(self, sequence: CacheSequence, match: Match) -> None:
        """A new sequence starts with a cached prefix. It counts as used when the sequence has run."""
        for group, run in enumerate(match.runs):
            for block, stop in run:
                sequence.tables[group].append(block, stop, self._versions.next())
                self._pools[group].hold(block, sequence.serial)
        sequence.committed = sequence.end = sequence.capacity = sequence.chained = match.num_tokens
        sequence.lossiest = match.lossiness
        sequence.hit_tokens = match.num_tokens
        self.stand_on(sequence, match.node)

    def count_hit(self, sequence: CacheSequence, request: Request) -> None:
        """The request has run with the prefix that it took up."""
        matched, sequence.hit_tokens = sequence.hit_tokens, 0
        if request.num_preemptions or not sequence.node:
            return
        for node in self._prefix.path_to(sequence.node):
            self._prefix.use(node)
        self._pins.renew(sequence.node)
        for table in sequence.tables:
            for block in table.blocks:
                if block.first >= matched:
                    break
                if block.nodes:
                    self._lives.reused(block)

    def let_go(self, sequence: CacheSequence) -> None:
        """The sequence ends."""
        if not sequence.hit_tokens:  # it ran
            self._pins.renew(sequence.node)
        self.stand_on(sequence, 0)

    def stand_on(self, sequence: CacheSequence, node: int) -> None:
        """The sequence has reached ``node``; 0: it is in the prefix cache no more."""
        old, sequence.node = sequence.node, node
        if node:
            self._prefix.retain(node)
        if old:
            self._prefix.release(old)

    # -- entering -------------------------------------------------------------------------------------------------

    def enter(self, sequence: CacheSequence, request: Request) -> None:
        """Enter newly completed chunks into the prefix cache."""
        if not sequence.use_prefix_cache or sequence.is_evicted:
            return
        prefix, start = self._prefix, sequence.chained
        stop = start + (sequence.committed - start) // CHUNK_TOKENS * CHUNK_TOKENS
        if stop <= start:
            return
        ids = _ids(request, start, stop)
        node = sequence.node or prefix.root(request.cache.salt)
        new: list[Block] = []
        for position in range(start, stop, CHUNK_TOKENS):
            node = prefix.child(node, ids[position - start : position - start + CHUNK_TOKENS])
            prefix.popularity.entered()
            if not request.num_preemptions:
                prefix.use(node)
            for group, table in enumerate(sequence.tables):
                block = table.blocks[table.index_at(position)]
                displaced = prefix.put(node, group, block, position, sequence.lossiest)
                if block.cached_ns < 0 and block.nodes:
                    new.append(block)
                if displaced is not None:
                    self._displace(group, displaced, block)
        self.stand_on(sequence, node)  # of those between each is the next one's parent
        sequence.chained = stop
        self._lives.all_cached(new)

    def _displace(self, group: int, old: Block, new: Block) -> None:
        """A chunk's less lossy KV took the place of another's."""
        new.floor = max(new.floor, old.floor, old.priority)  # what follows the old one follows the new one now
        if not old.nodes:
            self._lives.gone(old, DISPLACED)
        self._pools[group].settle(old)

    def pin(self, sequence: CacheSequence, request: Request, lossiness: int) -> None:
        """The prompt is complete: keep its whole chunks for a while, as a request that follows would find them."""
        if sequence.use_prefix_cache and request.cache.prefix_ttl_s is not None:
            match = self.match(request.prompt_ids, request.cache.salt, lossiness)
            pinned = self._pins.pin(request.request_id, match, request.cache.prefix_ttl_s, sequence.max_lossiness)
            request.num_pinned_tokens = match.num_tokens if pinned else 0


def _ids(request: Request, start: int, stop: int) -> list[int]:
    """Known tokens of positions start .. stop, without joining prompt and output."""
    prompt = len(request.prompt_ids)
    if stop <= prompt:
        return request.prompt_ids[start:stop]
    if start >= prompt:
        return request.output_ids[start - prompt : stop - prompt]
    return request.prompt_ids[start:] + request.output_ids[: stop - prompt]
