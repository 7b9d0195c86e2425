"""One sequence's block table as the int32 rows that kernels read, kept between steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.plan import Entry
from engine.request import Request
from engine.streaming import Expanded, expand
from kernels.layout import ENTRY_FORMAT, ENTRY_VALID, ENTRY_WIDTH, KVShape

Int32 = npt.NDArray[np.int32]


class BlockTables(Protocol):
    """The part of the cache manager that an executor reads."""

    def entries(self, request: Request, group: int, start: int = 0) -> Sequence[Entry]:
        """Blocks of a request from entry ``start`` on, in position order, those of the coming step included."""
        ...

    def entries_versions(self, requests: Sequence[Request], group: int) -> list[int]:
        """Of each request a number that grows with every change of its table but the growth of the last entry's
        ``valid``; it never repeats.
        """
        ...

    def first_changed_index(self, request: Request, group: int, since: int) -> int:
        """Lowest entry index that may differ from what was seen at version ``since`` (0: never seen)."""
        ...


@dataclass(eq=False, slots=True)
class TableRows:
    """A sequence's block table in one group: the first ``count`` rows of ``data`` as of the cache's ``version``.

    ``on_host``: of each row, whether its block is on the host. If any is, ``expanded`` is what kernels get.
    ``tail_*``: of the last row, in which new tokens go; how many are ``valid`` there is known to whoever schedules
    them. ``before_bytes``: stored bytes of the rows before it.
    """

    data: Int32 = field(default_factory=lambda: np.empty((8, ENTRY_WIDTH), np.int32))
    on_host: list[bool] = field(default_factory=list)
    count: int = 0
    version: int = 0
    expanded: Expanded | None = None
    tail_offset: int = 0
    tail_first: int = 0
    tail_token_bytes: int = 0
    before_bytes: int = 0
    num_on_host: int = 0

    def rows(self) -> Int32:
        """What goes into the batch's table, int32 [n, 4]; ``valid`` of the last one is as it was at ``version``."""
        return self.data[: self.count] if self.expanded is None else self.expanded.rows

    @property
    def num_rows(self) -> int:
        """How many those are."""
        return self.count if self.expanded is None else len(self.expanded.rows)

    def refresh(
        self,
        request: Request,
        group: int,
        version: int,
        shape: KVShape,
        token_bytes: Sequence[int],
        tables: BlockTables,
    ) -> int:
        """Bring the rows up to a version; returns the first of :meth:`rows` that may differ from what it was.

        ``token_bytes``: stored bytes per token by format code.
        """
        # What was the last row is read again too: its ``valid`` may have grown before others followed.
        last = max(self.count - 1, 0)
        start = min(tables.first_changed_index(request, group, self.version), last)
        entries = tables.entries(request, group, start)
        before = self.before_bytes
        if start != last:
            kept = self.data[:start]
            before = int((np.array(token_bytes)[kept[:, ENTRY_FORMAT]] * kept[:, ENTRY_VALID]).sum())
        self._replace(start, entries)
        self.version = version
        tail = entries[-1]
        self.before_bytes = before + sum([token_bytes[entry[1]] * entry[3] for entry in entries[:-1]])
        self.tail_offset, self.tail_first, self.tail_token_bytes = tail.offset, tail.first, token_bytes[tail[1]]
        was_expanded = self.expanded is not None
        if not (was_expanded or self.num_on_host):
            return start
        on_host = np.array(self.on_host, np.bool_)
        self.expanded = expand(self.data[: self.count], on_host, shape) if self.num_on_host else None
        return 0

    def _replace(self, start: int, entries: Sequence[Entry]) -> None:
        self.count = start + len(entries)
        if self.count > len(self.data):
            grown = np.empty((2 * self.count, ENTRY_WIDTH), np.int32)
            grown[:start] = self.data[:start]
            self.data = grown
        self.data[start : self.count] = [entry[:ENTRY_WIDTH] for entry in entries]
        self.num_on_host -= sum(self.on_host[start:])
        self.on_host[start:] = [entry.on_host for entry in entries]
        self.num_on_host += sum(self.on_host[start:])
