"""What :mod:`kernels.ops` refuses, and which backend it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels import cpu, ops, reference
from kernels.backend import select_backend
from kernels.layout import FORMATS, INT8, NATIVE, OFFSET_UNIT, KVShape
from kernels.table import TableView

SHAPE = KVShape(num_layers=2, num_kv_heads=2, head_dim=64, element_bytes=4)


def _table() -> TableView:
    return TableView(torch.tensor([[[0, 0, 0, 4]]], dtype=torch.int32), *(torch.ones(1, dtype=torch.int32),) * 2)


def _arena() -> torch.Tensor:
    return torch.zeros(SHAPE.block_bytes(NATIVE, 32) * 2, dtype=torch.uint8)


def _decode(**changed: Any) -> None:
    arguments: dict[str, Any] = {
        "query": torch.zeros(1, 4, 64),
        "arena": _arena(),
        "shape": SHAPE,
        "layer": 0,
        "table": _table(),
        "scale": 1.0,
        "out": torch.zeros(1, 4, 64),
    }
    ops.decode_attention(**{**arguments, **changed})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"arena": torch.zeros(64)}, "arena must be contiguous uint8"),
        ({"arena": torch.zeros(4096, dtype=torch.uint8)[::2]}, "arena must be contiguous uint8"),
        ({"layer": 2}, "layer 2 of a group of 2"),
        ({"layer": -1}, "layer -1"),
        ({"query": torch.zeros(1, 3, 64)}, "multiple of 2 heads"),
        ({"query": torch.zeros(1, 4, 32)}, "query must be"),
        ({"query": torch.zeros(1, 4, 64, dtype=torch.bfloat16)}, "does not have the 4 bytes"),
        ({"query": torch.zeros(1, 4, 64, dtype=torch.int32)}, "native dtype must be"),
        ({"out": torch.zeros(1, 4, 64, dtype=torch.float64)}, "out is torch.float64"),
        ({"out": torch.zeros(2, 4, 64)}, "out is"),
        ({"query": torch.zeros(2, 4, 64), "out": torch.zeros(2, 4, 64)}, "2 queries for 1 sequences"),
        ({"window": -1}, "window must be"),
        ({"backend": "cuda"}, "unknown kernel backend 'cuda'; known are cpu, triton, reference"),
    ],
)
def test_decode_refuses(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _decode(**changed)


@pytest.mark.parametrize(
    ("planned", "called", "message"),
    [
        ({}, {"table": _table()}, "made for another table"),
        ({"heads": 2}, {}, "made for heads 2, not 4"),
        ({"window": 3}, {}, "made for window 3, not 0"),
        ({"shape": KVShape(3, 2, 64, 4)}, {}, "made for shape KVShape.num_layers=3"),
        ({}, {"mass": torch.zeros(1, 2, 1)}, "without the share of attention"),
        ({"backend": "reference"}, {}, "made by another backend"),
    ],
)
def test_decode_refuses_a_plan_for_something_else(
    planned: dict[str, Any], called: dict[str, Any], message: str
) -> None:
    table = _table()
    arguments: dict[str, Any] = {"table": table, "shape": SHAPE, "heads": 4, "native_dtype": torch.float32}
    _decode(table=table, plan=ops.plan_decode(**arguments))
    plan = ops.plan_decode(**{**arguments, **planned})
    with pytest.raises(ValueError, match=message):
        _decode(**{"table": table, **called}, plan=plan)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"heads": 3}, "3 query heads for 2 KV heads"),
        ({"heads": 0}, "0 query heads"),
        ({"window": -1}, "window must be"),
        ({"native_dtype": torch.bfloat16}, "does not have the 4 bytes"),
        ({"table": TableView(*(torch.zeros(1, dtype=torch.int32),) * 3)}, "table entries must be"),
    ],
)
def test_plan_refuses(changed: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"table": _table(), "shape": SHAPE, "heads": 4, "native_dtype": torch.float32}
    with pytest.raises(ValueError, match=message):
        ops.plan_decode(**{**arguments, **changed})


@pytest.mark.parametrize("field", ["entries", "num_entries", "query_first"])
def test_tables_must_be_int32_of_the_right_shape(field: str) -> None:
    good = _table()
    for bad in (getattr(good, field).long(), getattr(good, field)[:0]):
        parts = {name: getattr(good, name) for name in ("entries", "num_entries", "query_first")}
        with pytest.raises(ValueError, match=r"must be int32|queries for"):
            _decode(table=TableView(**{**parts, field: bad}))


def test_write_refuses_wrong_shapes() -> None:
    slots = torch.zeros((3, 2), dtype=torch.int32)
    good = torch.zeros(3, 2, 64)
    with pytest.raises(ValueError, match=r"key .* and value .* must be"):
        ops.write_kv(_arena(), SHAPE, 0, good, good[:2], slots)
    with pytest.raises(ValueError, match=r"value torch\.bfloat16"):
        ops.write_kv(_arena(), SHAPE, 0, good, good.bfloat16(), slots)
    with pytest.raises(ValueError, match="slots must be int32"):
        ops.write_kv(_arena(), SHAPE, 0, good, good, slots[:2])


def test_prefill_refuses_wrong_starts() -> None:
    query = torch.zeros(1, 4, 64)
    with pytest.raises(ValueError, match="query_starts must be int32"):
        ops.prefill_attention(
            query, _arena(), SHAPE, 0, _table(), torch.zeros(1, dtype=torch.int32), scale=1.0, out=query.clone()
        )


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ((0, 0, 0, 1, 0, 0, -1, -1), "less lossy"),
        ((1, 0, 0, 3, 0, 0, -1, -1), "less lossy"),
        ((1, 0, 0, 0, 0, 0, -1, -1), "two native tiles"),
        ((4, 0, 0, 0, 0, 0, 0, 0), "unknown format"),
        ((1, 0, 0, -1, 0, 0, 0, 0), "unknown format"),
    ],
)
def test_recode_refuses(job: tuple[int, ...], message: str) -> None:
    arena = _arena()
    with pytest.raises(ValueError, match=message):
        ops.recode(arena, SHAPE, torch.tensor([job], dtype=torch.int32))
    assert not arena.any()


def test_two_byte_arenas_need_a_dtype() -> None:
    shape = KVShape(1, 1, 64, 2)
    jobs, entries = torch.zeros((0, 8), dtype=torch.int32), torch.zeros((1, 4), dtype=torch.int32)
    calls: list[Callable[[], object]] = [
        lambda: ops.recode(_arena(), shape, jobs),
        lambda: ops.gather_kv(_arena(), shape, 0, entries, 0),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="native_dtype is needed"):
            call()


def test_gather_refuses_more_entries_than_given() -> None:
    with pytest.raises(ValueError, match="2 entries asked for, 1 given"):
        ops.gather_kv(_arena(), SHAPE, 0, torch.zeros((1, 4), dtype=torch.int32), 2)


def test_backends_by_device_and_name() -> None:
    device = torch.device("cpu")
    assert select_backend(device) is cpu
    assert select_backend(device, "reference") is reference
    with pytest.raises(ValueError, match="does not serve tensors on cuda"):
        select_backend(torch.device("cuda"), "cpu")


def test_a_chosen_backend_is_used() -> None:
    """The reference leaves another last bit than the CPU kernels: both can be told apart and both are right."""
    generator = torch.Generator().manual_seed(1)
    arena = torch.randn(SHAPE.block_bytes(NATIVE, 32) // 4, generator=generator).view(torch.uint8)
    table = TableView(
        torch.tensor([[[0, 0, 0, 32]]], dtype=torch.int32),
        torch.ones(1, dtype=torch.int32),
        torch.tensor([31], dtype=torch.int32),
    )
    query = torch.randn((1, 4, 64), generator=generator)
    outs = {}
    for backend in ("cpu", "reference", reference):
        outs[backend] = torch.empty_like(query)
        ops.decode_attention(query, arena, SHAPE, 0, table, scale=0.125, out=outs[backend], backend=backend)
    assert torch.equal(outs["reference"], outs[reference])
    torch.testing.assert_close(outs["cpu"], outs["reference"], rtol=1e-5, atol=1e-5)


def test_format_codes_are_in_order_of_lossiness() -> None:
    """``ops.recode`` compares codes."""
    assert [kv_format.code for kv_format in FORMATS] == [kv_format.lossiness for kv_format in FORMATS] == [0, 1, 2, 3]


def test_arena_offset_beyond_two_gigabytes_is_not_truncated() -> None:
    """Offsets are int32 in units of 256 bytes; address arithmetic must be 64-bit. The arena is sparse."""
    shape = KVShape(1, 1, 64, 4)
    offset = (5 << 30) // OFFSET_UNIT
    arena = torch.empty((5 << 30) + shape.block_bytes(NATIVE, 32) * 2, dtype=torch.uint8)
    key = torch.randn(32, 1, 64)
    slots = torch.tensor([(offset, i) for i in range(32)], dtype=torch.int32)
    ops.write_kv(arena, shape, 0, key, -key, slots)
    away = offset + shape.block_bytes(NATIVE, 32) // OFFSET_UNIT
    ops.recode(arena, shape, torch.tensor([[INT8.code, away, 0, 0, offset, 0, offset, 1]], dtype=torch.int32))
    for code, tolerance in ((0, 0.0), (INT8.code, 0.02)):
        entries = torch.tensor([[offset if code == 0 else away, code, 0, 32]], dtype=torch.int32)
        got, value = ops.gather_kv(arena, shape, 0, entries, 1)
        torch.testing.assert_close(got, key, rtol=0, atol=tolerance)
        torch.testing.assert_close(value, -key, rtol=0, atol=tolerance)
        table = TableView(entries[None], torch.ones(1, dtype=torch.int32), torch.tensor([31], dtype=torch.int32))
        out = torch.full((1, 2, 64), torch.nan)
        ops.decode_attention(torch.zeros(1, 2, 64), arena, shape, 0, table, scale=1.0, out=out)
        torch.testing.assert_close(out[0, 0], -key[:, 0].mean(dim=0), rtol=0, atol=tolerance + 1e-6)
