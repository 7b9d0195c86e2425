"""Packed products against numpy's, and the promise that a row's result does not depend on the rows beside it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

pytest.importorskip("numba", reason="the CPU kernels need numba")

from numba import njit

from kernels.cpu.operands import as_operands, operands_like
from kernels.cpu.packed_weights import Sizes, can_pack
from kernels.cpu.products import HERE, PANEL, Tiling, multiply, packed, panels_of, row_products, tiling_for
from kernels.cpu.tiles import elements_of

SIZES = Sizes(hidden=64, heads=2, kv_heads=1, head_dim=16, intermediate=64, vocab=64, epsilon=1e-6)
DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if can_pack(dtype, SIZES)]
needs_vectors = pytest.mark.skipif(not DTYPES, reason="needs a processor with AVX2")


@njit
def call(x: Any, rows: Any, weights: Any, inputs: Any, panels: Any, out: Any) -> None:
    given, at = as_operands(x, 0, x.size, operands_like(weights, x.size))
    multiply(given, at, inputs, rows, weights, 0, inputs, panels, out, panels * PANEL)


def product(x: torch.Tensor, matrix: torch.Tensor) -> npt.NDArray[np.float32]:
    outputs, inputs = matrix.shape
    panels = panels_of(outputs)
    out = np.full(len(x) * panels * PANEL, np.nan, np.float32)
    weights = packed(elements_of(matrix, matrix.dtype))
    call(elements_of(x, x.dtype).reshape(-1), len(x), weights, inputs, panels, out)
    return out.reshape(len(x), -1)


@needs_vectors
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6, 7, 11, 12, 48])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 2), (130, 66), (192, 256)])
def test_products_are_numpys(dtype: torch.dtype, rows: int, outputs: int, inputs: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn((rows, inputs), generator=generator).to(dtype)
    matrix = torch.randn((outputs, inputs), generator=generator).to(dtype)
    found = product(x, matrix)
    expected = x.double().numpy() @ matrix.double().numpy().T
    np.testing.assert_allclose(found[:, :outputs], expected, rtol=1e-4, atol=1e-4 * inputs**0.5)
    assert (found[:, outputs:] == 0).all()


@needs_vectors
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_to_the_bit_whatever_is_beside_it(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((13, 96), generator=generator).to(dtype)
    matrix = torch.randn((128, 96), generator=generator).to(dtype)
    together = product(x, matrix)
    for row in range(13):
        assert (product(x[row : row + 1], matrix) == together[row]).all()
    assert (product(x[4:9], matrix) == together[4:9]).all()


def test_odd_inputs_and_half_precision_are_not_packed() -> None:
    assert not can_pack(torch.float16, SIZES)
    assert not can_pack(torch.float32, Sizes(63, 2, 1, 16, 64, 64, 1e-6))


@needs_vectors
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tiling", [Tiling(8, 3, 4, has_dots=False), Tiling(16, 4, 6, has_dots=False)], ids=str)
def test_tilings_of_other_processors(dtype: torch.dtype, tiling: Tiling) -> None:
    """AVX2's on a processor with more, and AVX-512's without bfloat16 on any: LLVM splits vectors that are too wide."""
    multiply_rows = row_products(tiling.rows, tiling)

    @njit
    def one_panel(x: Any, weights: Any, inputs: Any, out: Any) -> None:
        multiply_rows(x, 0, inputs, weights, 0, inputs, out, 0, out.shape[0] * inputs // x.shape[0])

    inputs = 34
    generator = torch.Generator().manual_seed(1)
    x = torch.randn((tiling.rows, inputs), generator=generator)
    matrix = torch.randn((tiling.panel, inputs), generator=generator).to(dtype)
    pair = 1 if dtype == torch.float32 else 2
    elements = elements_of(matrix, dtype).reshape(tiling.panel, inputs // pair, pair)
    out = np.full(tiling.rows * tiling.panel, np.nan, np.float32)
    one_panel(x.numpy().reshape(-1), np.ascontiguousarray(elements.transpose(1, 0, 2)).reshape(-1), inputs, out)
    expected = x.double().numpy() @ matrix.double().numpy().T
    np.testing.assert_allclose(out.reshape(tiling.rows, -1), expected, rtol=1e-4, atol=1e-4)


def test_what_processors_get() -> None:
    assert tiling_for({}) is None
    assert tiling_for({"avx2": True}) is None
    assert tiling_for({"avx2": True, "fma": True}) == Tiling(8, 3, 4, has_dots=False)
    assert tiling_for({"avx2": True, "fma": True, "avx512f": True}) == Tiling(16, 4, 6, has_dots=False)
    everything = {"avx2": True, "fma": True, "avx512f": True, "avx512bf16": True}
    assert tiling_for(everything) == Tiling(16, 4, 6, has_dots=True)
    assert HERE is None or HERE.panel == PANEL
