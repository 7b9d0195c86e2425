"""What attention needs to know of one step: block tables, slots and query ranges, built incrementally on the host.

The cache manager owns the truth as Python entries; here they become int32 arrays. Rows of a sequence are kept between
steps and rebuilt only when the cache says that its blocks changed, so a decode step costs no more than its tail. All
arrays of a step lie in one buffer and go to the device in one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from torch import Tensor

from engine.group_tables import GroupTables
from engine.plan import ScheduledSequence
from engine.request import Request
from engine.staging import StagingBuffer
from engine.streaming import GroupStream, StreamPlanner
from engine.table_rows import BlockTables, TableRows
from kernels.layout import ENTRY_OFFSET, ENTRY_WIDTH, KVShape
from kernels.table import TableView

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

    ``sequences`` are the plan's, in the order of the batch. ``first_rows``: where each one's tokens begin.
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
        self._planners: Sequence[StreamPlanner] = ()
        self._groups = [GroupTables(group, *pair) for group, pair in enumerate(zip(shapes, windows, strict=True))]
        self._rows: WeakKeyDictionary[Request, list[TableRows]] = WeakKeyDictionary()
        self._staging = StagingBuffer(device)
        self._batch: list[ref[Request]] = []  # whose rows the groups have
        self._is_filled = False  # the tables hold what the groups say, and nobody has changed them since
        self._last: list[GroupInputs] = []  # on a CPU: views of the tables that are kept

    def stream_through(self, planners: Sequence[StreamPlanner]) -> None:
        """Where tiles of each group that lie on the host go while they are attended."""
        self._planners = planners

    def build(self, scheduled: Sequence[ScheduledSequence], tables: BlockTables) -> StepInputs:
        """Inputs of one step. Sequences of one token come first, whatever the reason for their having one."""
        sequences = [sequence for sequence in scheduled if sequence.num_tokens == 1]
        num_decode = len(sequences)
        if num_decode < len(scheduled):
            sequences += [sequence for sequence in scheduled if sequence.num_tokens > 1]
        requests = [sequence.request for sequence in sequences]
        starts = [sequence.start for sequence in sequences]
        lengths = [sequence.num_tokens for sequence in sequences[num_decode:]]
        is_kept = self._use(requests) and self._is_filled
        self._is_filled = False
        widths = []
        for group in self._groups:
            group.refresh(requests, tables)
            widths.append(-(-max(group.counts) // _WIDTH_STEP) * _WIDTH_STEP)

        num_tokens, num_sequences = num_decode + sum(lengths), len(sequences)
        sizes = [num_tokens, num_tokens, num_sequences, num_sequences - num_decode + 1]
        for width in widths:
            sizes += [2 * num_tokens, num_sequences * width * ENTRY_WIDTH, num_sequences]
        host = self._staging.reserve(sizes)
        is_kept &= self._staging.is_kept
        ids, positions, query_first, query_starts = host[:4]
        query_first[:] = starts
        positions[:num_decode] = query_first[:num_decode]
        stops, end = query_first + 1, max(starts[:num_decode], default=-1) + 1
        first_rows, row = list(range(num_decode)), num_decode
        query_starts[0] = 0
        for index, length in enumerate(lengths):
            start = starts[num_decode + index]
            positions[row : row + length] = np.arange(start, start + length)
            stops[num_decode + index] = start + length
            end = max(end, start + length)
            first_rows.append(row)
            row += length
            query_starts[index + 1] = row - num_decode
        ids[:] = _token_ids(requests, starts, lengths)

        read = written = 0
        for number, (group, width) in enumerate(zip(self._groups, widths, strict=True)):
            slots, entries, counts = host[4 + 3 * number : 7 + 3 * number]
            table = entries.reshape(num_sequences, width, ENTRY_WIDTH)
            group.fill_table(table, counts, stops, is_kept=is_kept)
            group.fill_slots(num_decode, positions, first_rows, slots.reshape(-1, 2))
            read += group.bytes_read(table, counts, query_first)
            written += num_tokens * group.token_bytes[0]

        streams = [self._streamed(number, width) for number, width in enumerate(widths)]
        is_streamed = any(streams)
        ids_sent, positions_sent, query_first_sent, starts_sent, *parts = self._staging.send()
        if not (is_kept and self._device.type == "cpu" and not is_streamed):
            # On a CPU nobody waits for a device to learn it, and views that tell no figure hold for many steps.
            farthest = None if self._device.type == "cpu" else max(starts[:num_decode], default=0)
            self._last = _views(num_decode, widths, farthest, query_first_sent, parts, streams)
        self._is_filled = not is_streamed  # offsets of streamed tiles are changed in place
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

    def _use(self, requests: list[Request]) -> bool:
        """Have the groups work on these; whether they did already."""
        if [known() for known in self._batch] == requests:
            return True
        self._batch = []
        rows = [self._rows_of(request) for request in requests]
        for number, group in enumerate(self._groups):
            group.use([row[number] for row in rows])
        self._batch = list(map(ref, requests))
        return False

    def _rows_of(self, request: Request) -> list[TableRows]:
        rows = self._rows.get(request)
        if rows is None:
            rows = self._rows[request] = [TableRows() for _ in self._groups]
        return rows

    def _streamed(self, number: int, width: int) -> GroupStream | None:
        group = self._groups[number]
        if not group.num_expanded:
            return None
        rows = group.rows
        parts = [(index * width, row.expanded) for index, row in enumerate(rows) if row.expanded is not None]
        cells = np.concatenate([(first + part.at) * ENTRY_WIDTH + ENTRY_OFFSET for first, part in parts])
        source = np.concatenate([part.source for _, part in parts])
        codes = np.concatenate([part.codes for _, part in parts])
        return self._planners[number].plan(cells, source, codes, self._device)


def _views(
    num_decode: int,
    widths: Sequence[int],
    farthest: int | None,
    query_first: Tensor,
    parts: Sequence[Tensor],
    streams: Sequence[GroupStream | None],
) -> list[GroupInputs]:
    groups = []
    for number, width in enumerate(widths):
        slots, entries, counts = parts[3 * number : 3 * number + 3]
        table = entries.view(len(counts), width, ENTRY_WIDTH)
        decode = prefill = None
        if num_decode:
            decode = TableView(table[:num_decode], counts[:num_decode], query_first[:num_decode], farthest)
        if num_decode < len(counts):
            prefill = TableView(table[num_decode:], counts[num_decode:], query_first[num_decode:])
        groups.append(GroupInputs(slots.view(-1, 2), decode, prefill, table, streams[number]))
    return groups


def _token_ids(requests: Sequence[Request], starts: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """The token ids to be computed; the last sequences are chunks of these lengths."""
    num_decode = len(requests) - len(lengths)
    tokens = [
        request.output_ids[index] if (index := start - len(request.prompt_ids)) >= 0 else request.prompt_ids[start]
        for request, start in zip(requests[:num_decode], starts, strict=False)
    ]
    for request, start, length in zip(requests[num_decode:], starts[num_decode:], lengths, strict=True):
        stop = start + length
        tokens += (request.prompt_ids if stop <= len(request.prompt_ids) else request.all_ids)[start:stop]
    return tokens
