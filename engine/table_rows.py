"""One sequence's block table as the int32 rows that kernels read, kept between steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.plan import Entry, ScheduledSequence
from engine.request import Request
from engine.streaming import Expanded, expand
from kernels.layout import ENTRY_FORMAT, ENTRY_VALID, ENTRY_WIDTH, KVShape

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


class BlockTables(Protocol):
    """The part of the cache manager that an executor reads."""

    def entries(self, request: Request, group: int, start: int = 0) -> Sequence[Entry]:
        """Blocks of a request from entry ``start`` on, in position order, those of the coming step included."""
        ...

    def entries_version(self, request: Request, group: int) -> int:
        """Grows with every change of the table but the growth of the last entry's ``valid``; never repeats."""
        ...

    def first_changed_index(self, request: Request, group: int, since: int) -> int:
        """Lowest entry index that may differ from what was seen at version ``since`` (0: never seen)."""
        ...


@dataclass
class TableRows:
    """A sequence's block table in one group: the first ``count`` rows of ``data`` as of the cache's ``version``.

    ``on_host``: of each row, whether its block is on the host. If any is, ``expanded`` is what kernels get.
    ``tail_*``: of the last row, in which new tokens go. ``before_bytes``: stored bytes of the rows before it.
    """

    data: Int32 = field(default_factory=lambda: np.empty((8, ENTRY_WIDTH), np.int32))
    on_host: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(8, np.bool_))
    count: int = 0
    version: int = 0
    expanded: Expanded | None = None
    tail_offset: int = 0
    tail_first: int = 0
    tail_valid: int = 0
    tail_token_bytes: int = 0
    before_bytes: int = 0

    @property
    def read_bytes(self) -> int:
        """Stored bytes of all rows."""
        return self.before_bytes + self.tail_token_bytes * self.tail_valid

    def rows(self) -> Int32:
        """What goes into the batch's table, int32 [n, 4]."""
        return self.data[: self.count] if self.expanded is None else self.expanded.rows

    def refresh(
        self, sequence: ScheduledSequence, group: int, shape: KVShape, token_bytes: Int64, tables: BlockTables
    ) -> int:
        """Bring the rows up to date and return the number that goes into the batch's table.

        ``token_bytes``: stored bytes per token by format code.
        """
        request = sequence.request
        version = tables.entries_version(request, group)
        if version != self.version:
            # What was the last row is read again too: its ``valid`` may have grown before others followed.
            start = min(tables.first_changed_index(request, group, self.version), max(self.count - 1, 0))
            self._replace(start, tables.entries(request, group, start))
            self.version = version
            on_host = self.on_host[: self.count]
            self.expanded = expand(self.data[: self.count], on_host, shape) if on_host.any() else None
            self.tail_offset, code, self.tail_first, _ = self.data[self.count - 1].tolist()
            before = self.data[: self.count - 1]
            self.tail_token_bytes = int(token_bytes[code])
            self.before_bytes = int((token_bytes[before[:, ENTRY_FORMAT]] * before[:, ENTRY_VALID]).sum())
        self.tail_valid = sequence.start + sequence.num_tokens - self.tail_first
        self.data[self.count - 1, ENTRY_VALID] = self.tail_valid
        if self.expanded is None:
            return self.count
        self.expanded.rows[-1] = self.data[self.count - 1]
        return len(self.expanded.rows)

    def _replace(self, start: int, entries: Sequence[Entry]) -> None:
        self.count = start + len(entries)
        if self.count > len(self.data):
            grown = np.empty((2 * self.count, ENTRY_WIDTH), np.int32)
            grown[:start] = self.data[:start]
            self.data = grown
            self.on_host = np.concatenate([self.on_host, np.zeros(len(grown) - len(self.on_host), np.bool_)])
        if entries:
            columns = [(entry.offset, entry.format_code, entry.first, entry.valid) for entry in entries]
            self.data[start : self.count] = columns
            self.on_host[start : self.count] = [entry.on_host for entry in entries]
