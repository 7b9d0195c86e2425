"""The quantisation formula: error bounds, constants, ranges that overflow, and golden codes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kernels.reference.quantise import LEVELS, dequantise, pack_nibbles, quantise, round_up, unpack_nibbles
from kernels.reference.tolerances import attention_tolerance, storage_tolerance

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEAD_DIMS = (48, 64, 80, 96, 128, 256)


def _round_trip(values: torch.Tensor, bits: int, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dequantised, scale, largest allowed error) of native ``values``."""
    wide = values.to(torch.float32)
    codes, scale, zero = quantise(wide, bits, dim, values.dtype)
    low, high = wide.amin(dim, keepdim=True), wide.amax(dim, keepdim=True)
    step = high / LEVELS[bits] - low / LEVELS[bits]
    allowed = storage_tolerance(values.dtype, step, wide.abs().amax(dim, keepdim=True))
    return dequantise(codes, scale, zero), scale, allowed


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dim", [-1, -2])
def test_narrow_band_away_from_zero(dtype: torch.dtype, head_dim: int, bits: int, dim: int) -> None:
    """A range that excludes zero is not widened to include it, whatever the head size (lmdeploy#4849)."""
    generator = torch.Generator().manual_seed(head_dim)
    values = (5 + torch.rand((32, head_dim), generator=generator)).to(dtype)
    values[0, 0], values[1, 1] = 5.0, 6.0
    got, scale, allowed = _round_trip(values, bits, dim)
    assert ((got - values.float()).abs() <= allowed).all()
    assert (allowed <= 1 / LEVELS[bits] / 2 * (1 + 2 * torch.finfo(dtype).eps) + 1e-5).all()
    # At most the band itself, rounded up once: the scale shows that nothing outside it was covered.
    assert (scale.float() * LEVELS[bits] <= 1.0 * (1 + 2 * torch.finfo(dtype).eps)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("constant", [0.0, 3.5, 100.0, -100.0, 1e-8, 60000.0, -60000.0])
def test_constants_come_back_as_themselves(dtype: torch.dtype, bits: int, constant: float) -> None:
    values = torch.full((32, 48), constant).to(dtype)
    for dim in (-1, -2):
        got, scale, _ = _round_trip(values, bits, dim)
        assert torch.equal(got, values.float())
        assert torch.equal(scale, torch.zeros_like(scale))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("base", [0.0, 3.5, 100.0, -100.0, 1e-8, 60000.0])
def test_near_constants_are_within_half_a_step(dtype: torch.dtype, bits: int, base: float) -> None:
    """One element one unit in the last place away, and one far away (openvino#34105)."""
    for other in (math.inf, 60000.0, -60000.0, 0.0):
        values = torch.full((32, 48), base).to(dtype)
        # For positive floats the next one is the next integer of the same bits; for negative ones it is nearer to zero.
        integers = values.view(torch.int16 if dtype.itemsize == 2 else torch.int32)
        if other == math.inf:
            integers[3, 5] += 1
        else:
            values[3, 5] = other
        got, scale, allowed = _round_trip(values, bits, -1)
        assert torch.isfinite(scale).all()
        assert torch.isfinite(got).all()
        assert ((got - values.float()).abs() <= allowed).all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ranges_wider_than_the_largest_value(dtype: torch.dtype, bits: int) -> None:
    """The range overflows, in the dtype or even in float32; nothing becomes infinite."""
    limit = float(torch.tensor(torch.finfo(dtype).max * 0.9).to(dtype))
    values = (torch.linspace(-1, 1, 64) * limit).to(dtype)[None]
    got, scale, allowed = _round_trip(values, bits, -1)
    assert torch.isfinite(scale).all()
    assert torch.isfinite(got).all()
    assert ((got / 2 - values.float() / 2).abs() <= allowed / 2).all()


def test_subnormal_ranges_are_finite() -> None:
    for dtype in DTYPES:
        tiny = torch.tensor([0.0, torch.finfo(dtype).smallest_normal]).to(dtype)[None] / 8
        got, _, _ = _round_trip(tiny, 4, -1)
        assert torch.isfinite(got).all()
        assert ((got - tiny.float()).abs() <= torch.finfo(dtype).smallest_normal).all()


def test_golden_codes() -> None:
    values = torch.tensor([[-1.0, -0.5, 0.0, 0.49, 0.51, 2.0]])
    codes, scale, zero = quantise(values, 4, -1, torch.float32)
    assert zero.item() == -1.0
    assert scale.item() == np.float32(0.2)
    assert codes.tolist() == [[0, 3, 5, 7, 8, 15]]
    _, scale, _ = quantise(values, 4, -1, torch.bfloat16)
    assert scale.item() == 0.2001953125  # 0.2 is not a bfloat16: the next larger one


def test_signed_zeros_give_one_zero_point() -> None:
    """The minimum of -0.0 and 0.0 is either, by the implementation of min; what is stored is not."""
    for values in (torch.tensor([[-0.0, 0.0, 1.0]]), torch.tensor([[0.0, -0.0, 1.0]])):
        _, _, zero = quantise(values, 8, -1, torch.float32)
        assert math.copysign(1.0, zero.item()) == 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_round_up_is_the_smallest_that_covers(dtype: torch.dtype) -> None:
    values = torch.rand(10000, generator=torch.Generator().manual_seed(1)) * 2.0 ** torch.linspace(-20, 3, 10000)
    up = round_up(values, dtype)
    assert (up.float() >= values).all()
    below = (up.view(torch.int16) - 1).view(dtype).float()
    assert (below < values).all()
    assert torch.equal(round_up(up.float(), dtype), up)


def test_requantising_keeps_the_zero_point_exact() -> None:
    """Code 0 occurs in every group, so that int8 to int4 starts from a native value again."""
    values = torch.randn((32, 64), generator=torch.Generator().manual_seed(2)).bfloat16().float()
    codes, scale, zero = quantise(values, 8, -2, torch.bfloat16)
    once = dequantise(codes, scale, zero)
    _, _, again = quantise(once, 4, -2, torch.bfloat16)
    assert torch.equal(again, zero)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_nibbles_unpack_to_what_was_packed(head_dim: int) -> None:
    codes = torch.randint(0, 16, (3, 32, head_dim), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    packed = pack_nibbles(codes)
    assert packed.shape == (3, 32, head_dim // 2)
    assert int(packed[0, 0, 1]) == int(codes[0, 0, 1]) + 16 * int(codes[0, 0, 1 + head_dim // 2])
    assert torch.equal(unpack_nibbles(packed), codes)


def test_tolerances_exist_for_native_dtypes_only() -> None:
    assert attention_tolerance(torch.float32).atol < attention_tolerance(torch.float16).atol
    with pytest.raises(ValueError, match=r"no tolerance for torch\.float64"):
        attention_tolerance(torch.float64)
