"""The benchmark measures what it says, on cases of milliseconds."""

from __future__ import annotations

import json
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch

from kernels import ops
from kernels.bench import __main__ as command
from kernels.bench import naive, rows
from kernels.bench.measure import Case, interleaved, paged_cache, read_bandwidth
from kernels.layout import FORMATS, INT8, NATIVE, OFFSET_UNIT, KVFormat, KVShape

CASE = Case(2, 96, 4, 2, 16, block_size=32)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@DTYPES
def test_floors_are_the_bytes_of_what_is_stored(dtype: torch.dtype) -> None:
    row = rows.decode(CASE, dtype, 1e9, 2)
    shape = KVShape(1, 2, 16, dtype.itemsize)
    for kv_format in FORMATS:
        stored = 2 * 96 * shape.tile_bytes(kv_format) // kv_format.tile_tokens
        assert row["floor_ms"][kv_format.name] == pytest.approx(stored / 1e6, rel=1e-2, abs=1e-4)
        assert row["ms"][kv_format.name] > 0
    assert row["ratio_vs_sdpa"] == pytest.approx(row["ms"]["sdpa"] / row["ms"]["native"], rel=0.05)
    assert row["over_native"]["native"] == 1


@DTYPES
def test_torch_and_the_kernels_compute_the_same(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared must be the same work: torch's two ways agree with ours on one cache."""
    generator = torch.Generator().manual_seed(5)
    arena, table = paged_cache(CASE, NATIVE, dtype, generator)
    query = torch.randn((2, 4, 16), generator=generator).to(dtype)
    out = torch.empty_like(query)
    ops.decode_attention(query, arena, CASE.shape(dtype), 0, table, scale=CASE.scale, out=out)
    gathered = [
        torch.stack(ops.gather_kv(arena, CASE.shape(dtype), 0, entries, 3, native_dtype=dtype))
        for entries in table.entries
    ]
    pools = torch.stack(gathered, dim=1).to(dtype).view(2, 6, 32, 2, 16)
    made = iter(pools)
    monkeypatch.setattr(torch, "randn", lambda *_, **__: next(made))
    monkeypatch.setattr(torch, "randperm", lambda count, **_: torch.arange(count))
    ways = rows.torch_decode(CASE, query, generator)
    for way in ways.values():
        theirs: Any = way()
        torch.testing.assert_close(theirs.reshape(2, 4, 16), out, rtol=2e-2, atol=2e-2)


def test_calls_take_turns() -> None:
    order: list[str] = []
    seconds = interleaved({name: partial(order.append, name) for name in "abc"}, 4)
    assert set(seconds) == set("abc")
    rounds = [order[start : start + 3] for start in range(0, len(order), 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in rounds)
    assert len(rounds) == 5
    assert len(set(map(tuple, rounds))) > 1
    assert read_bandwidth(1, 1 << 20) > 1e8


@DTYPES
@pytest.mark.parametrize("target", FORMATS[1:], ids=lambda kv_format: kv_format.name)
def test_recode_targets_lie_in_the_arena_and_apart_from_each_other(dtype: torch.dtype, target: KVFormat) -> None:
    """A quantised tile of 32 tokens with 2-byte elements is larger than a native one of 16."""
    shape = KVShape(6, 2, 64, dtype.itemsize)
    arena, jobs, moved = rows.recode_jobs(shape, target, 96, dtype, torch.Generator().manual_seed(0))
    spans = []
    for _, offset, _, _, first, _, second, _ in jobs.tolist():
        spans.append((offset * OFFSET_UNIT, shape.tile_stride(target)))
        spans += [(place * OFFSET_UNIT, shape.tile_stride(NATIVE)) for place in (first, second)]
    spans.sort()
    assert all(start + size <= later for (start, size), (later, _) in pairwise(spans))
    assert sum(spans[-1]) <= len(arena)
    assert moved == sum(size for _, size in spans)


def test_the_naive_cache_and_the_paged_one_write_the_same_token() -> None:
    row = naive.hot_spots(Case(1, 96, 4, 2, 16, block_size=32), torch.float32, 2)
    assert set(row["ms"]) == {
        "naive_growth", "naive_concatenation", "paged_write", "naive_scattered", "paged_attention",
    }  # fmt: skip
    assert min(row["ms"].values()) > 0


def test_figures_are_the_worst_of_their_cases() -> None:
    def row(context: int, ratio: float, int8: float, share: float) -> dict[str, Any]:
        names = [kv_format.name for kv_format in FORMATS]
        return {
            "context": context, "ratio_vs_sdpa": ratio, "ratio_vs_folded": ratio / 2, "mass_over_native": 1.1,
            "over_native": dict.fromkeys(names, int8), "bandwidth_share": dict.fromkeys(names, share),
        }  # fmt: skip

    got = command.figures([row(512, 1.5, 0.9, 0.1), row(2048, 3.0, 0.8, 0.5), row(2048, 2.0, 0.95, 0.4)])
    assert got["decode_ratio_vs_sdpa"] == {"512": 1.5, "2048": 2.0}
    assert got["int8_over_native"] == {"512": 0.9, "2048": 0.95}
    assert got["bandwidth_share"][INT8.name] == 0.4


def test_the_command_ends_with_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        assert command.main(["--quick", "--rounds", "1"]) == 0
    finally:
        torch.set_num_threads(threads)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(result["decode_ratio_vs_sdpa"]) == {"128", "256"}
    assert {row["row"] for row in result["rows"]} == {"decode", "prefill", "storage", "naive"}
