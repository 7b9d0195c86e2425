"""The block tables of a step's sequences in one layer group, kept up to date from step to step.

While the same sequences run, a step costs a look at their versions and a few operations on whole columns; only rows
whose blocks have changed are touched one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.request import Request
from engine.table_rows import BlockTables, TableRows
from kernels.layout import ENTRY_FIRST, ENTRY_FORMAT, ENTRY_OFFSET, ENTRY_VALID, ENTRY_WIDTH, FORMATS, KVShape

Int32 = npt.NDArray[np.int32]

_NEVER = -1


class GroupTables:
    """One group's. ``rows`` are those of the batch's sequences, in its order, ``num_expanded`` of them with blocks on
    the host; ``counts`` (of rows) and columns ``tail_*`` go by sequence, see :class:`engine.table_rows.TableRows`.
    """

    def __init__(self, group: int, shape: KVShape, window: int | None) -> None:
        self.rows: list[TableRows] = []
        self.counts: list[int] = []
        self.token_bytes = [shape.tile_stride(kind) // kind.tile_tokens for kind in FORMATS]
        self._group = group
        self._shape = shape
        self._window = window
        self._versions: list[int] = []
        self._changed: dict[int, int] = {}  # sequence -> first row that the batch's table does not have yet
        self.num_expanded = 0
        self._before_bytes = 0
        self._tail_offset, self._tail_first = np.zeros((2, 0), np.int32)
        self._tail_token_bytes = np.zeros(0, np.int64)
        self._tail_valid = self._tail_first
        self._tail_cells = np.empty(0, np.int64)  # where the last rows' ``valid`` lie in the batch's table

    def use(self, rows: Sequence[TableRows]) -> None:
        """Another batch from now on."""
        number = len(rows)
        self.rows = list(rows)
        self.counts = [0] * number
        self._versions = [_NEVER] * number
        self._changed.clear()
        self._tail_offset, self._tail_first = np.zeros((2, number), np.int32)
        self._tail_token_bytes = np.zeros(number, np.int64)

    def refresh(self, requests: Sequence[Request], tables: BlockTables) -> None:
        """Bring the rows up to date."""
        versions = tables.entries_versions(requests, self._group)
        if versions == self._versions:
            return
        for index, (version, known) in enumerate(zip(versions, self._versions, strict=True)):
            if version != known:
                self._refresh_row(index, requests[index], version, tables)
        self._versions = versions
        self.num_expanded = sum([row.expanded is not None for row in self.rows])
        self._before_bytes = sum([row.before_bytes for row in self.rows])

    def _refresh_row(self, index: int, request: Request, version: int, tables: BlockTables) -> None:
        row = self.rows[index]
        start = row.num_rows - 1
        if row.version != version:
            start = row.refresh(request, self._group, version, self._shape, self.token_bytes, tables)
        self._changed[index] = min(start, self._changed.get(index, start))
        self.counts[index] = row.num_rows
        self._tail_offset[index] = row.tail_offset
        self._tail_first[index] = row.tail_first
        self._tail_token_bytes[index] = row.tail_token_bytes

    def fill_table(self, table: Int32, counts: Int32, stops: Int32, *, is_kept: bool) -> None:
        """Write rows into the batch's table, int32 [sequences, width, 4], and how many each sequence has.

        ``stops``: up to which position each sequence is computed with this step. ``is_kept``: the table holds the rows
        of the last step, so that what has changed is enough.
        """
        changed = self._changed if is_kept else dict.fromkeys(range(len(self.rows)), 0)
        if changed:
            for index, start in changed.items():
                data = self.rows[index].rows()
                table[index, start : len(data)] = data[start:]
            counts[:] = self.counts
            width = table.shape[1]
            lasts = [index * width + count for index, count in enumerate(self.counts)]
            self._tail_cells = np.array(lasts) * ENTRY_WIDTH + (ENTRY_VALID - ENTRY_WIDTH)
            self._changed.clear()
        self._tail_valid = stops - self._tail_first
        table.reshape(-1)[self._tail_cells] = self._tail_valid

    def fill_slots(self, num_decode: int, positions: Int32, first_rows: Sequence[int], slots: Int32) -> None:
        """Each new token's slot, int32 [tokens, 2]: its block's offset and its place inside. After ``fill_table``."""
        if num_decode:
            slots[:num_decode, 0] = self._tail_offset[:num_decode]
            slots[:num_decode, 1] = self._tail_valid[:num_decode] - 1
        bounds = [*first_rows[num_decode:], len(positions)]
        for row, start, stop in zip(self.rows[num_decode:], bounds[:-1], bounds[1:], strict=True):
            data, where = row.rows(), positions[start:stop]
            block = np.searchsorted(data[:, ENTRY_FIRST], where, side="right") - 1
            slots[start:stop, 0] = data[block, ENTRY_OFFSET]
            slots[start:stop, 1] = where - data[block, ENTRY_FIRST]

    def bytes_read(self, table: Int32, counts: Int32, query_first: Int32) -> int:
        """Stored bytes that attention covers, each sequence's counted once. After ``fill_table``."""
        if self._window is None and not self.num_expanded:
            return self._before_bytes + int(np.dot(self._tail_token_bytes, self._tail_valid))
        present = np.arange(table.shape[1])[None, :] < counts[:, None]
        first, valid = table[..., ENTRY_FIRST], table[..., ENTRY_VALID]
        if self._window is not None:
            hidden = np.clip((query_first - self._window + 1)[:, None] - first, 0, valid)
            valid = valid - hidden
        per_token = np.array(self.token_bytes)[np.where(present, table[..., ENTRY_FORMAT], 0)]
        return int((per_token * np.where(present, valid, 0)).sum())
