"""Runs of bytes from one tensor to another: exactly these, and what is refused."""

from __future__ import annotations

import pytest
import torch

from kernels import ops


def _random_rows(generator: torch.Generator, count: int, longest: int, source_bytes: int) -> tuple[torch.Tensor, int]:
    """Even runs of 0 .. longest bytes from anywhere, in shuffled order with gaps in the target; and its size."""

    def even(high: int) -> torch.Tensor:
        return torch.randint(0, high // 2 + 1, (count,), generator=generator) * 2

    sizes, gaps = even(longest), even(32)
    places = (sizes + gaps).cumsum(0) - sizes
    starts = (even(source_bytes) % (source_bytes - sizes + 1)) // 2 * 2
    rows = torch.stack((starts, places, sizes), dim=1)
    return rows[torch.randperm(count, generator=generator)], int(places[-1] + sizes[-1]) + 6


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("seed", range(4))
def test_copies_exactly_the_rows(backend: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(0, 256, (20_000,), dtype=torch.uint8, generator=generator)
    rows, size = _random_rows(generator, 40, (2, 64, 700, 5000)[seed], len(source))
    # Views into larger tensors: only their own bytes may be touched.
    around = torch.full((size + 4,), 171, dtype=torch.uint8)
    want = around.clone()
    for start, place, length in rows.tolist():
        for i in range(length):
            want[2 + place + i] = source[start + i]
    ops.copy_bytes(source, around[2:-2], rows, backend=backend)
    assert torch.equal(around, want)
    assert (around == 171).sum() > 4


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_within_one_tensor_and_nothing(backend: str) -> None:
    arena = torch.arange(64, dtype=torch.uint8)
    ops.copy_bytes(arena, arena, torch.tensor([[0, 32, 8], [60, 40, 4]]), backend=backend)
    assert arena[32:44].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 60, 61, 62, 63]
    before = arena.clone()
    ops.copy_bytes(arena, arena, torch.zeros((0, 3), dtype=torch.int64), backend=backend)
    ops.copy_bytes(arena, arena, torch.tensor([[64, 64, 0], [0, 8, 0], [0, 8, 0]]), backend=backend)
    assert torch.equal(arena, before)


def test_strided_rows_and_bytes_beyond_four_gigabytes() -> None:
    far = (5 << 30) + 6
    sparse = torch.empty(far + 16, dtype=torch.uint8)
    near = torch.arange(16, dtype=torch.uint8)
    rows = torch.tensor([[4], [far], [8]]).T
    for backend in ("cpu", "reference"):
        sparse[far : far + 8] = 0
        ops.copy_bytes(near, sparse, rows, backend=backend)
        assert sparse[far : far + 8].tolist() == [4, 5, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((0, 0, 3), "odd"),
        ((1, 0, 2), "odd"),
        ((0, 1, 2), "odd"),
        ((-2, 0, 2), "negative"),
        ((0, -2, 2), "negative"),
        ((0, 0, -2), "negative"),
        ((10, 0, 8), "leaves the source of 16 bytes"),
        ((0, 26, 8), "leaves the target of 32 bytes"),
        ((1 << 62, 0, 1 << 62), "leaves the source"),
        ((0, 20, 4), "same bytes"),
        ((0, 18, 14), "same bytes"),
    ],
)
def test_refuses_rows_and_copies_nothing(row: tuple[int, int, int], message: str) -> None:
    target = torch.zeros(32, dtype=torch.uint8)
    good = [(0, 22, 8), (8, 0, 4)]
    with pytest.raises(ValueError, match=message):
        ops.copy_bytes(torch.ones(16, dtype=torch.uint8), target, torch.tensor([good[0], row, good[1]]))
    assert not target.any()
    ops.copy_bytes(torch.ones(16, dtype=torch.uint8), target, torch.tensor(good))
    assert target.sum() == 12


def test_refuses_tensors_that_are_not_bytes() -> None:
    good, rows = torch.zeros(16, dtype=torch.uint8), torch.zeros((1, 3), dtype=torch.int64)
    for bad in (torch.zeros(4), good.view(4, 4), torch.zeros(32, dtype=torch.uint8)[::2]):
        with pytest.raises(ValueError, match="source must be contiguous uint8"):
            ops.copy_bytes(bad, good, rows)
        with pytest.raises(ValueError, match="target must be contiguous uint8"):
            ops.copy_bytes(good, bad, rows)
    with pytest.raises(ValueError, match="target starts at an odd byte"):
        ops.copy_bytes(good, good[1:], rows)
    for bad in (rows.int(), rows[0], rows[:, :2]):
        with pytest.raises(ValueError, match="rows must be int64"):
            ops.copy_bytes(good, good, bad)
    with pytest.raises(ValueError, match="on meta"):
        ops.copy_bytes(good, good, rows.to("meta"))
