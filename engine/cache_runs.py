"""What :mod:`engine.decode_run` needs of the cache: commits that only count, and many at once. No torch."""

from __future__ import annotations

from abc import ABC, abstractmethod

from engine.attention_mass import ObservedMass
from engine.block_pool import BlockPool
from engine.cache_sequence import CacheSequence, CacheSettings
from engine.formats import NATIVE, NATIVE_CLASSES
from engine.memory_model import GroupSpec
from engine.request import Request


class RunsFace(ABC):
    """A part of :class:`engine.cache_manager.CacheManager`, whose books these are."""

    groups: tuple[GroupSpec, ...]
    _settings: CacheSettings
    _by_request: dict[str, CacheSequence]
    _pools: list[BlockPool]

    @abstractmethod
    def commit(self, request: Request, num_computed: int, mass: ObservedMass | None = None) -> None:
        """See :meth:`engine.cache_manager.CacheManager.commit`."""

    def is_quiet(self) -> bool:
        """Whether commits do nothing but count: every block is native and of the size it should have, nothing is
        evicted and the model hides nothing. Holds until a block of another size is taken or settings change.
        """
        settings = self._settings
        if settings.kv_format != NATIVE.name or settings.eviction != "none":
            return False
        wanted = NATIVE_CLASSES[settings.block_size]
        for pool, group in zip(self._pools, self.groups, strict=True):
            if group.window is not None or len(pool.class_counts) != 1 or wanted not in pool.class_counts:
                return False
        return True

    def capacity(self, request: Request) -> int:
        """Tokens of a request that have slots in every group."""
        return self._by_request[request.request_id].capacity

    def note_computed(self, request: Request, num_computed: int, end: int) -> None:
        """``allocate`` and ``commit`` where they only count: the slots are there, and no chunk has been completed."""
        sequence = self._by_request[request.request_id]
        sequence.committed, sequence.end = num_computed, end

    def commit_run(self, request: Request, num_computed: int) -> None:
        """``commit`` after several steps for whose tokens slots were there."""
        sequence = self._by_request[request.request_id]
        sequence.end = max(sequence.end, num_computed)
        self.commit(request, num_computed)
