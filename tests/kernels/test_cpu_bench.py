"""The benchmark measures what it says, on a case of milliseconds."""

from __future__ import annotations

import pytest
import torch

from kernels.bench import Bench, Case, show
from kernels.layout import FORMATS, INT4, INT8, KVShape


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
