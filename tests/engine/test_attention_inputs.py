"""Block tables, slots and query ranges of a step, against the entries that they come from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from engine.attention import BatchBuilder, StepInputs
from engine.plan import Entry, ScheduledSequence
from engine.request import Request, SamplingParams
from kernels.layout import INT8, NATIVE, KVShape

SHAPES = [KVShape(2, 1, 8, 4), KVShape(3, 2, 8, 4)]
PER_TOKEN = [shape.tile_stride(NATIVE) // 16 for shape in SHAPES]


class FakeTables:
    """Entries set by the test; counts how many were read."""

    def __init__(self) -> None:
        self.tables: dict[tuple[Request, int], list[Entry]] = {}
        self.changed: dict[tuple[Request, int], tuple[int, int]] = {}
        self.version = 0
        self.num_read = 0

    def set(self, request: Request, group: int, entries: list[Entry], first_changed: int = 0) -> None:
        self.version += 1
        self.tables[request, group] = entries
        self.changed[request, group] = (self.version, first_changed)

    def entries(self, request: Request, group: int, start: int = 0) -> Sequence[Entry]:
        found = self.tables[request, group][start:]
        self.num_read += len(found)
        return found

    def entries_version(self, request: Request, group: int) -> int:
        return self.changed[request, group][0]

    def first_changed_index(self, request: Request, group: int, since: int) -> int:
        return 0 if since == 0 else self.changed[request, group][1]


def make(prompt: int, output: int = 0) -> Request:
    request = Request("r", list(range(100, 100 + prompt)), SamplingParams(max_tokens=99), arrival_ns=0)
    request.output_ids = list(range(500, 500 + output))
    return request


def native(offset: int, first: int, valid: int = 16) -> Entry:
    return Entry(offset, NATIVE.code, first, valid)


def builder(num_groups: int = 1, windows: Sequence[int | None] = (None, None)) -> BatchBuilder:
    return BatchBuilder(SHAPES[:num_groups], windows[:num_groups], torch.device("cpu"))


def test_mixed_batch_puts_single_tokens_first() -> None:
    chunked, decoding = make(40), make(20, output=5)
    tables = FakeTables()
    tables.set(chunked, 0, [native(7, 0), native(3, 16, 4)])
    tables.set(decoding, 0, [native(50, 0), native(60, 16, 9)])
    plan = [ScheduledSequence(chunked, 10, 10, samples=False), ScheduledSequence(decoding, 24, 1, samples=True)]
    inputs = builder().build(plan, tables)
    assert inputs.num_decode == 1
    assert inputs.sequences == [plan[1], plan[0]]
    assert inputs.first_rows == [0, 1]
    assert inputs.ids.tolist() == [504, *range(110, 120)]
    assert inputs.positions.tolist() == [24, *range(10, 20)]
    assert inputs.end == 25
    assert inputs.query_starts.tolist() == [0, 10]
    group = inputs.groups[0]
    assert group.slots.tolist() == [[60, 8], *[[7, i] for i in range(10, 16)], *[[3, i] for i in range(4)]]
    assert group.decode is not None
    assert group.prefill is not None
    assert group.decode.entries[0, :2].tolist() == [[50, 0, 0, 16], [60, 0, 16, 9]]
    assert group.decode.num_entries.tolist() == [2]
    assert group.decode.query_first.tolist() == [24]
    assert group.prefill.entries[0, :2].tolist() == [[7, 0, 0, 16], [3, 0, 16, 4]]
    assert group.prefill.query_first.tolist() == [10]


def test_recomputed_outputs_are_part_of_the_chunk() -> None:
    request = make(20, output=10)
    tables = FakeTables()
    tables.set(request, 0, [native(1, 0), native(2, 16, 12)])
    inputs = builder().build([ScheduledSequence(request, 18, 10, samples=False)], tables)
    assert inputs.ids.tolist() == [118, 119, *range(500, 508)]
    assert inputs.groups[0].decode is None


def test_tail_grows_without_reading_entries_again() -> None:
    request, tables, build = make(4, output=40), FakeTables(), builder()
    tables.set(request, 0, [native(9, 0, 5)])
    assert valid_of(build.build([ScheduledSequence(request, 4, 1, samples=True)], tables)) == [5]
    assert tables.num_read == 1
    assert valid_of(build.build([ScheduledSequence(request, 5, 1, samples=True)], tables)) == [6]
    assert tables.num_read == 1
    tables.set(request, 0, [native(9, 0), native(11, 16, 2)], first_changed=1)
    assert valid_of(build.build([ScheduledSequence(request, 6, 12, samples=True)], tables)) == [16, 2]
    tables.set(request, 0, [native(9, 0), native(11, 16), native(12, 32, 1)], first_changed=2)
    tables.num_read = 0
    assert valid_of(build.build([ScheduledSequence(request, 18, 15, samples=True)], tables)) == [16, 16, 1]
    assert tables.num_read == 2  # what was the last row, and the new one


def test_many_blocks_grow_and_shrink_the_rows() -> None:
    request, tables, build = make(400), FakeTables(), builder()
    for count in (3, 25, 24, 2, 25):
        entries = [native(5 + i, 16 * i) for i in range(count)]
        tables.set(request, 0, entries)
        inputs = build.build([ScheduledSequence(request, 16 * count - 3, 3, samples=False)], tables)
        view = inputs.groups[0].prefill
        assert view is not None
        assert view.num_entries.tolist() == [count]
        assert view.entries[0, :count, 0].tolist() == [entry.offset for entry in entries]


def test_evicted_ranges_and_blocks_entered_in_the_middle() -> None:
    request, tables = make(200), FakeTables()
    entries = [Entry(1, INT8.code, 0, 32), native(8, 96, 16), native(9, 112, 48), native(10, 160, 10)]
    tables.set(request, 0, entries)
    inputs = builder().build([ScheduledSequence(request, 150, 20, samples=False)], tables)
    slots = inputs.groups[0].slots.tolist()
    assert slots == [[9, i] for i in range(38, 48)] + [[10, i] for i in range(10)]


def test_groups_have_tables_of_their_own_and_bytes_add_up() -> None:
    request, tables = make(40, output=9), FakeTables()
    tables.set(request, 0, [Entry(1, INT8.code, 0, 32), native(8, 32, 16)])
    tables.set(request, 1, [native(70, 32, 16)])
    inputs = builder(2, (None, 10)).build([ScheduledSequence(request, 47, 1, samples=True)], tables)
    assert [group.slots.tolist() for group in inputs.groups] == [[[8, 15]], [[70, 15]]]
    int8 = SHAPES[0].tile_stride(INT8)
    assert inputs.kv_bytes_read == int8 + 16 * PER_TOKEN[0] + 10 * PER_TOKEN[1]
    assert inputs.kv_bytes_written == sum(PER_TOKEN)


@pytest.mark.parametrize("windows", [(None,), (5,), (16,), (17,), (40,)])
def test_bytes_read_count_what_the_window_shows(windows: tuple[int | None]) -> None:
    request, tables = make(64), FakeTables()
    tables.set(request, 0, [native(i, 16 * i) for i in range(3)])
    inputs = builder(1, windows).build([ScheduledSequence(request, 40, 8, samples=False)], tables)
    shown = 48 if windows[0] is None else np.sum(np.arange(48) > 40 - windows[0])  # of the first query
    assert inputs.kv_bytes_read == shown * PER_TOKEN[0]


def test_rows_are_forgotten_with_their_request() -> None:
    build, tables = builder(), FakeTables()
    request = make(4)
    tables.set(request, 0, [native(1, 0, 4)])
    build.build([ScheduledSequence(request, 0, 4, samples=True)], tables)
    assert len(build._rows) == 1
    tables.tables.clear()
    tables.changed.clear()
    del request
    assert len(build._rows) == 0


def valid_of(inputs: StepInputs) -> list[int]:
    group = inputs.groups[0]
    view = group.decode or group.prefill
    assert view is not None
    return view.entries[0, : int(view.num_entries[0]), 3].tolist()
