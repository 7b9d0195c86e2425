"""Block tables, slots and query ranges of a step, against the entries that they come from."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

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
        self.changes: dict[tuple[Request, int], list[tuple[int, int]]] = {}  # version, first entry
        self.version = 0
        self.num_read = 0

    def set(self, request: Request, group: int, entries: list[Entry], first_changed: int = 0) -> None:
        self.version += 1
        self.tables[request, group] = entries
        self.changes.setdefault((request, group), []).append((self.version, first_changed))

    def entries(self, request: Request, group: int, start: int = 0) -> Sequence[Entry]:
        found = self.tables[request, group][start:]
        self.num_read += len(found)
        return found

    def entries_versions(self, requests: Sequence[Request], group: int) -> list[int]:
        return [self.changes[request, group][-1][0] for request in requests]

    def first_changed_index(self, request: Request, group: int, since: int) -> int:
        found = [first for version, first in self.changes[request, group] if version > since]
        return 0 if since == 0 else min(found)


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
    tables.changes.clear()
    del request
    assert len(build._rows) == 0


def valid_of(inputs: StepInputs) -> list[int]:
    group = inputs.groups[0]
    view = group.decode or group.prefill
    assert view is not None
    return view.entries[0, : int(view.num_entries[0]), 3].tolist()


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("seed", range(4))
def test_kept_tables_are_those_of_a_builder_that_sees_them_for_the_first_time(seed: int, window: int | None) -> None:
    """Sequences come, go, change places, grow, and have blocks replaced anywhere."""
    rng, tables = random.Random(seed), FakeTables()
    build, live, computed = builder(1, (window,)), list[Request](), dict[Request, int]()
    offsets = iter(range(10, 1 << 20))
    for _ in range(150):
        if len(live) < 6 and rng.random() < 0.3:
            live.append(make(rng.randint(1, 300), output=400))
            computed[live[-1]] = 0
        if live and rng.random() < 0.05:
            rng.shuffle(live)
        if live and rng.random() < 0.05:
            live.pop()
        plan = []
        for request in live:
            if rng.random() < 0.05:
                continue
            start = computed[request]
            if start and rng.random() < 0.03:  # a conversion: from some entry on, all lie elsewhere
                old = tables.tables[request, 0]
                first = rng.randrange(len(old))
                moved = [Entry(next(offsets), INT8.code, *entry[2:]) for entry in old[first:]]
                tables.set(request, 0, [*old[:first], *moved], first)
            number = 1 if start >= len(request.prompt_ids) else rng.randint(1, len(request.prompt_ids) - start)
            cover(tables, request, start + number, offsets)
            plan.append(ScheduledSequence(request, start, number, samples=True))
            computed[request] = start + number
        if not plan:
            continue
        for _ in range(rng.choice([1, 1, 2])):  # a step that failed is tried again
            inputs = build.build(plan, tables)
        fresh = builder(1, (window,)).build(plan, Unchanged(tables))
        assert picture(inputs) == picture(fresh)


class Unchanged:
    """Tables as somebody sees them who has not seen them before."""

    def __init__(self, tables: FakeTables) -> None:
        self.entries, self.entries_versions = tables.entries, tables.entries_versions

    def first_changed_index(self, _request: Request, _group: int, _since: int) -> int:
        return 0


def cover(tables: FakeTables, request: Request, stop: int, offsets: Iterator[int]) -> None:
    """Blocks up to a position. A table that has all of them stays as it is: only its last entry grows."""
    old = tables.tables.get((request, 0), [])
    end = old[-1].first + 16 if old else 0
    if end < stop:
        whole = [entry._replace(valid=16) for entry in old]
        new = [native(next(offsets), first, min(16, stop - first)) for first in range(end, stop, 16)]
        tables.set(request, 0, whole + new, max(0, len(old) - 1))


def picture(inputs: StepInputs) -> list[object]:
    group = inputs.groups[0]
    seen: list[object] = [inputs.ids.tolist(), inputs.positions.tolist(), inputs.end, inputs.first_rows]
    seen += [inputs.query_starts.tolist(), group.slots.tolist(), inputs.kv_bytes_read, inputs.kv_bytes_written]
    for view in (group.decode, group.prefill):
        if view is not None:
            counts = view.num_entries.tolist()
            rows = [row[:count].tolist() for row, count in zip(view.entries, counts, strict=True)]
            seen += [rows, counts, view.query_first.tolist()]
    return seen
