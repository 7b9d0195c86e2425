"""What an executor reads of the cache: block tables and slots. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from engine.block_table import BlockTable
from engine.cache_sequence import CacheSequence
from engine.plan import Entry
from engine.request import Request


class TablesFace:
    """A part of :class:`engine.cache_manager.CacheManager`, whose books these are."""

    _by_request: dict[str, CacheSequence]

    def table(self, request: Request, group: int) -> BlockTable:
        """A request's block table in one group, to read. Raises KeyError for a request that holds nothing."""
        return self._by_request[request.request_id].tables[group]

    def entries(self, request: Request, group: int, start: int = 0) -> Sequence[Entry]:
        """The block table from entry index ``start`` on, in position order, including this step's allocated tokens.

        Raises KeyError for a request that holds nothing.
        """
        sequence = self._by_request[request.request_id]
        return sequence.tables[group].entries(start, sequence.end)

    def num_entries(self, request: Request, group: int) -> int:
        """How many entries the block table has."""
        return self._by_request[request.request_id].tables[group].num_entries

    def entries_version(self, request: Request, group: int) -> int:
        """Version of a block table; grows with every change but the growth of the last entry's ``valid``.

        Never repeats within an engine's life, also not when a request is preempted and comes back.
        """
        return self._by_request[request.request_id].tables[group].version

    def entries_versions(self, requests: Sequence[Request], group: int) -> list[int]:
        """The same for several requests."""
        by_request = self._by_request
        return [by_request[request.request_id].tables[group].version for request in requests]

    def first_changed_index(self, request: Request, group: int, since: int) -> int:
        """Lowest entry index that may differ from what a reader saw at version ``since`` (0: never seen).

        Incremental readers keep, per request and group, the version they saw, and each step
        ``start = min(first_changed_index(...), num_entries - 1)``, then rewrite their rows from ``start`` with
        ``entries(request, group, start)`` and cut to ``num_entries``. The last entry is always rewritten, because its
        ``valid`` grows without a new version. Equal to ``num_entries`` when nothing else changed.
        """
        return self._by_request[request.request_id].tables[group].first_changed(since)

    def slots(self, request: Request, start: int, num_tokens: int, group: int) -> list[tuple[int, int]]:
        """(block offset, token index in block) per token of positions ``start .. + num_tokens``, all allocated."""
        runs = self.slot_runs(request, start, num_tokens, group)
        return [(offset, first + i) for offset, first, count in runs for i in range(count)]

    def slot_runs(self, request: Request, start: int, num_tokens: int, group: int) -> list[tuple[int, int, int]]:
        """The same as runs: (block offset, first token index in block, number of tokens)."""
        return self._by_request[request.request_id].tables[group].slot_runs(start, num_tokens)
