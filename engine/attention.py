"""What attention needs to know of one step: block tables, slots and query ranges, built incrementally on the host.

The cache manager owns the truth as Python entries; here they become int32 arrays. Rows of a sequence are kept between
steps and rebuilt only when the cache says that its blocks changed, so a decode step costs no more than its tail. All
arrays of a step lie in one buffer and go to the device in one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.plan import ScheduledSequence
from engine.request import Request
from engine.staging import StagingBuffer
from engine.streaming import GroupStream, StreamPlanner
from engine.table_rows import BlockTables, TableRows
from kernels.layout import ENTRY_FIRST, ENTRY_FORMAT, ENTRY_OFFSET, ENTRY_VALID, ENTRY_WIDTH, FORMATS, KVShape
from kernels.table import TableView

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

# Tables are made a little wider than they need be: their shape, and with it what they hold, then stays for some steps.
_WIDTH_STEP = 16


@dataclass(frozen=True)
class GroupInputs:
    """One layer group's share of a step: where new tokens go, and the tables of both kinds of sequences.

    ``entries``: the rows of both tables, int32 [sequences, width, 4]; if some are ``streamed``, their offsets change
    from layer to layer.
    """

    slots: Tensor  # int32 [tokens, 2]
    decode: TableView | None
    prefill: TableView | None
    entries: Tensor
    streamed: GroupStream | None = None


@dataclass(frozen=True)
class StepInputs:
    """One step as a flat batch: ``num_decode`` sequences of one token each, then the chunks of the others.

    ``sequences`` are the plan's, in the order of the batch. ``last_rows``: row of each sequence's last token.
    ``kv_bytes_read``: stored bytes that attention covers, each sequence's counted once; ``kv_bytes_written``: new ones.
    """

    sequences: list[ScheduledSequence]
    first_rows: list[int]
    ids: Tensor  # int32 [tokens]
    positions: Tensor  # int32 [tokens]
    end: int  # one more than the largest position
    num_decode: int
    query_starts: Tensor  # int32 [chunks + 1], relative to the first chunk
    groups: list[GroupInputs]
    kv_bytes_read: int
    kv_bytes_written: int

    @property
    def host_bytes_read(self) -> int:
        """Bytes that are streamed from the host, all layers."""
        streams = [group.streamed for group in self.groups if group.streamed is not None]
        return sum(stream.num_bytes * len(stream.copies) for stream in streams)


class BatchBuilder:
    """Turns scheduled sequences into :class:`StepInputs`. Keeps table rows per request as long as the request lives."""

    def __init__(self, shapes: Sequence[KVShape], windows: Sequence[int | None], device: torch.device) -> None:
        self._device = device
        self._shapes = shapes
        self._windows = windows
        self._planners: Sequence[StreamPlanner] = ()
        self._token_bytes = [_token_bytes(shape) for shape in shapes]
        self._rows: WeakKeyDictionary[Request, list[TableRows]] = WeakKeyDictionary()
        self._staging = StagingBuffer(device)
        # Whose rows the tables hold, by identity (versions never repeat, so another of the same one is noticed); none
        # where they cannot be relied on.
        self._filled: list[int] = []
        self._last: list[GroupInputs] = []  # on a CPU: views of the tables that are kept
        self._copied: list[list[int]] = [[] for _ in shapes]  # by group and row: the version that was copied

    def stream_through(self, planners: Sequence[StreamPlanner]) -> None:
        """Where tiles of each group that lie on the host go while they are attended."""
        self._planners = planners

    def build(self, scheduled: Sequence[ScheduledSequence], tables: BlockTables) -> StepInputs:
        """Inputs of one step. Sequences of one token come first, whatever the reason for their having one."""
        singles = [sequence for sequence in scheduled if sequence.num_tokens == 1]
        chunks = [sequence for sequence in scheduled if sequence.num_tokens > 1]
        sequences = singles + chunks
        lengths = [sequence.num_tokens for sequence in sequences]
        num_decode, num_tokens = len(singles), sum(lengths)
        rows = [self._rows_of(sequence.request) for sequence in sequences]
        counts_of: list[list[int]] = []
        for group, (shape, token_bytes) in enumerate(zip(self._shapes, self._token_bytes, strict=True)):
            pairs = zip(sequences, rows, strict=True)
            counts_of.append([row[group].refresh(part, group, shape, token_bytes, tables) for part, row in pairs])
        widths = [-(-max(counts) // _WIDTH_STEP) * _WIDTH_STEP for counts in counts_of]

        sizes = [num_tokens, num_tokens, len(sequences), len(chunks) + 1]
        for width in widths:
            sizes += [2 * num_tokens, len(sequences) * width * ENTRY_WIDTH, len(sequences)]
        host = self._staging.reserve(sizes)
        ids, positions, query_first, query_starts = host[:4]
        first_rows = _fill_ids(sequences, ids)
        query_first[:] = [sequence.start for sequence in sequences]
        positions[:num_decode] = query_first[:num_decode]
        for sequence, first in zip(chunks, first_rows[num_decode:], strict=True):
            positions[first : first + sequence.num_tokens] = range(sequence.start, sequence.start + sequence.num_tokens)
        query_starts[0] = 0
        np.cumsum(lengths[num_decode:], out=query_starts[1:])

        owners = list(map(id, rows))
        is_kept = self._staging.is_kept and owners == self._filled
        read = written = 0
        for group, width in enumerate(widths):
            slots, entries, counts = host[4 + 3 * group : 7 + 3 * group]
            table = entries.reshape(len(sequences), width, ENTRY_WIDTH)
            of_group = [row[group] for row in rows]
            if not is_kept:
                self._copied[group] = [-1] * len(rows)
            counts[:] = counts_of[group]
            _copy_rows(of_group, self._copied[group], table, counts)
            _fill_slots(of_group, num_decode, positions, first_rows, slots.reshape(-1, 2))
            if self._windows[group] is None and all(row.expanded is None for row in of_group):
                read += sum(row.read_bytes for row in of_group)
            else:
                read += self._bytes_read(group, table, counts, query_first)
            written += num_tokens * int(self._token_bytes[group][0])

        end = max(sequence.start + sequence.num_tokens for sequence in sequences)
        streams = [self._streamed([row[group] for row in rows], group, width) for group, width in enumerate(widths)]
        # Offsets of streamed tiles are changed in place.
        self._filled = [] if any(streams) else owners
        ids_sent, positions_sent, query_first_sent, starts_sent, *parts = self._staging.send()
        if not (is_kept and self._device.type == "cpu" and not any(streams)):
            self._last = self._views(sequences, num_decode, widths, query_first_sent, parts, streams)
        return StepInputs(
            sequences,
            first_rows,
            ids_sent,
            positions_sent,
            end,
            num_decode,
            starts_sent,
            self._last,
            read,
            written,
        )

    def _streamed(self, rows: Sequence[TableRows], group: int, width: int) -> GroupStream | None:
        parts = [(index * width, row.expanded) for index, row in enumerate(rows) if row.expanded is not None]
        if not parts:
            return None
        cells = np.concatenate([(first + part.at) * ENTRY_WIDTH + ENTRY_OFFSET for first, part in parts])
        source = np.concatenate([part.source for _, part in parts])
        codes = np.concatenate([part.codes for _, part in parts])
        return self._planners[group].plan(cells, source, codes, self._device)

    def _rows_of(self, request: Request) -> list[TableRows]:
        rows = self._rows.get(request)
        if rows is None:
            rows = self._rows[request] = [TableRows() for _ in self._token_bytes]
        return rows

    def _bytes_read(self, group: int, table: Int32, counts: Int32, query_first: Int32) -> int:
        present = np.arange(table.shape[1])[None, :] < counts[:, None]
        first, valid = table[..., ENTRY_FIRST], table[..., ENTRY_VALID]
        window = self._windows[group]
        if window is not None:
            hidden = np.clip((query_first - window + 1)[:, None] - first, 0, valid)
            valid = valid - hidden
        per_token = self._token_bytes[group][np.where(present, table[..., ENTRY_FORMAT], 0)]
        return int((per_token * np.where(present, valid, 0)).sum())

    def _views(
        self,
        sequences: Sequence[ScheduledSequence],
        num_decode: int,
        widths: Sequence[int],
        query_first: Tensor,
        parts: Sequence[Tensor],
        streams: Sequence[GroupStream | None],
    ) -> list[GroupInputs]:
        # On a CPU nobody waits for a device to learn it, and views that tell no figure hold for many steps.
        farthest = None
        if self._device.type != "cpu":
            farthest = max((sequence.start for sequence in sequences[:num_decode]), default=0)
        groups = []
        for group, width in enumerate(widths):
            slots, entries, counts = parts[3 * group : 3 * group + 3]
            table = entries.view(len(sequences), width, ENTRY_WIDTH)
            decode = prefill = None
            if num_decode:
                decode = TableView(table[:num_decode], counts[:num_decode], query_first[:num_decode], farthest)
            if num_decode < len(sequences):
                prefill = TableView(table[num_decode:], counts[num_decode:], query_first[num_decode:])
            groups.append(GroupInputs(slots.view(-1, 2), decode, prefill, table, streams[group]))
        return groups


def _fill_ids(sequences: Sequence[ScheduledSequence], ids: Int32) -> list[int]:
    """Write the token ids to be computed; returns the row where each sequence begins."""
    tokens: list[int] = []
    first_rows = []
    for sequence in sequences:
        first_rows.append(len(tokens))
        request, start, num_prompt = sequence.request, sequence.start, len(sequence.request.prompt_ids)
        if sequence.num_tokens == 1:  # the usual case makes no copy of the history
            tokens.append(request.output_ids[start - num_prompt] if start >= num_prompt else request.prompt_ids[start])
        else:
            stop = start + sequence.num_tokens
            tokens += request.prompt_ids[start:stop] if stop <= num_prompt else request.all_ids[start:stop]
    ids[:] = tokens
    return first_rows


def _copy_rows(rows: Sequence[TableRows], copied: list[int], table: Int32, counts: Int32) -> None:
    """Copy rows that have changed since they were copied into the batch's table; of the others only the end moves."""
    for index, row in enumerate(rows):
        if copied[index] != row.version or row.expanded is not None:
            data = row.rows()
            table[index, : len(data)] = data
            copied[index] = row.version
    table[np.arange(len(rows)), counts - 1, ENTRY_VALID] = [row.tail_valid for row in rows]


def _fill_slots(
    rows: Sequence[TableRows], num_decode: int, positions: Int32, first_rows: Sequence[int], slots: Int32
) -> None:
    """Each new token's slot: its block's offset and its place inside."""
    if num_decode:
        slots[:num_decode, 0] = [row.tail_offset for row in rows[:num_decode]]
        slots[:num_decode, 1] = [row.tail_valid - 1 for row in rows[:num_decode]]
    bounds = [*first_rows[num_decode:], len(positions)]
    for row, start, stop in zip(rows[num_decode:], bounds[:-1], bounds[1:], strict=True):
        data, where = row.rows(), positions[start:stop]
        block = np.searchsorted(data[:, ENTRY_FIRST], where, side="right") - 1
        slots[start:stop, 0] = data[block, ENTRY_OFFSET]
        slots[start:stop, 1] = where - data[block, ENTRY_FIRST]


def _token_bytes(shape: KVShape) -> npt.NDArray[np.int64]:
    """Stored bytes per token by format code, all layers, scales included."""
    return np.array([shape.tile_stride(kv_format) // kv_format.tile_tokens for kv_format in FORMATS], np.int64)
