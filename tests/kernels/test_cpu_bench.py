"""The benchmark measures what it says, on a case of milliseconds."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from kernels import ops
from kernels.bench import Bench, Case, show
from kernels.layout import FORMATS, INT4, INT8, NATIVE, OFFSET_UNIT, KVFormat, KVShape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_count_the_bytes_of_what_is_stored(dtype: torch.dtype, capsys: pytest.CaptureFixture[str]) -> None:
    bench = Bench(torch.device("cpu"), dtype, repeats=1)
    assert bench.bandwidth > 1e8
    case = Case(2, 96, 2, 1, 16, block_size=32)
    shape = KVShape(1, 1, 16, dtype.itemsize)
    rows = [bench.decode(case, kv_format, against_reference=True) for kv_format in FORMATS]
    for row, kv_format in zip(rows, FORMATS, strict=True):
        assert row.bytes_moved == 2 * 96 * shape.tile_bytes(kv_format) // kv_format.tile_tokens
        assert row.bound_s == row.bytes_moved / bench.bandwidth
        assert row.seconds > 0
        assert row.reference_s is not None
    rows += [bench.prefill(case, INT8, 32), bench.recode(INT4, tokens=64)]
    for row in rows:
        show(row)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(rows)
    assert all("ms" in line for line in lines)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("target", FORMATS[1:], ids=lambda kv_format: kv_format.name)
def test_recode_targets_lie_in_the_arena_and_apart_from_each_other(
    dtype: torch.dtype, target: KVFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quantised tile of 32 tokens with 2-byte elements is larger than a native one of 16."""
    seen: list[tuple[torch.Tensor, KVShape, torch.Tensor]] = []
    monkeypatch.setattr(ops, "recode", lambda arena, shape, jobs, **_: seen.append((arena, shape, jobs)))
    Bench(torch.device("cpu"), dtype, repeats=1).recode(target, tokens=96)
    arena, shape, jobs = seen[0]
    spans = []
    for _, offset, _, _, first, _, second, _ in jobs.tolist():
        spans.append((offset * OFFSET_UNIT, shape.tile_stride(target)))
        spans += [(place * OFFSET_UNIT, shape.tile_stride(NATIVE)) for place in (first, second)]
    spans.sort()
    assert all(start + size <= later for (start, size), (later, _) in pairwise(spans))
    assert sum(spans[-1]) <= len(arena)
