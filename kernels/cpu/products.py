# ruff: noqa: ARG001 - an intrinsic takes what its code generator gets
"""Products of a few rows with a packed matrix, in AVX-512 registers: 64 outputs of up to 6 rows at a time.

A step's matrices are small, and a library spends more time on finding out what it is asked for than on the products.
Each output adds its products in the order of the inputs, whatever rows are computed beside it, so that a row's result
does not depend on the batch, not even in the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils

from kernels.cpu.compile import exact, lowlevel

PANEL = 64  # outputs that lie together, and are computed together
_LANES = 16
_VECTORS = PANEL // _LANES
_WORD = ir.IntType(32)
_FLOATS = ir.VectorType(ir.FloatType(), _LANES)
_WORDS = ir.VectorType(_WORD, _LANES)
_BF16 = types.uint16


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


_PAIRS = ir.VectorType(_BFloat(), 2 * _LANES)


def _row_products(rows: int) -> Callable[..., Any]:
    """An intrinsic for ``rows`` rows and one panel.

    ``(x, at, stride, weights, place, inputs, out, to, out_stride)``: row r begins at ``x[at + r * stride]``, the panel
    at ``weights[place]``; 64 float32 go to ``out[to + r * out_stride]``.
    """

    @lowlevel
    def products(
        typing_context: Any,
        x: Any, at: Any, stride: Any, weights: Any, place: Any, inputs: Any, out: Any, to: Any, out_stride: Any,
    ) -> Any:  # fmt: skip
        if x.dtype != weights.dtype or x.dtype not in (types.float32, _BF16) or out.dtype != types.float32:
            return None
        is_paired = x.dtype == _BF16

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            kinds = signature.args
            x, at, stride, weights, place, inputs, out, to, out_stride = arguments
            index = at.type

            def pointer(position: int, array: Any, where: Any, kind: Any) -> Any:
                data = context.make_array(kinds[position])(context, builder, value=array).data
                return builder.bitcast(builder.gep(data, [where]), kind.as_pointer())

            def constant(value: int) -> Any:
                return ir.Constant(index, value)

            zero = ir.Constant(_FLOATS, [0.0] * _LANES)
            sums = [[cgutils.alloca_once_value(builder, zero) for _ in range(_VECTORS)] for _ in range(rows)]  # type: ignore[no-untyped-call]
            starts = [builder.add(at, builder.mul(constant(row), stride)) for row in range(rows)]
            per_step = 2 if is_paired else 1  # inputs
            with cgutils.for_range(builder, builder.udiv(inputs, constant(per_step))) as loop:
                first = builder.mul(loop.index, constant(per_step))
                panel = builder.add(place, builder.mul(first, constant(PANEL)))
                line = [
                    builder.load(
                        pointer(
                            3, weights, builder.add(panel, constant(v * _LANES * per_step)),
                            _WORDS if is_paired else _FLOATS,
                        ),
                        align=4,
                    )
                    for v in range(_VECTORS)
                ]  # fmt: skip
                for row in range(rows):
                    where = pointer(0, x, builder.add(starts[row], first), _WORD if is_paired else ir.FloatType())
                    value = _splat(builder, builder.load(where, align=2 if is_paired else 4))
                    for v in range(_VECTORS):
                        total = builder.load(sums[row][v])
                        builder.store(_multiply_add(builder, line[v], value, total, is_paired=is_paired), sums[row][v])
            for row in range(rows):
                for v in range(_VECTORS):
                    where = builder.add(builder.add(to, builder.mul(constant(row), out_stride)), constant(v * _LANES))
                    builder.store(builder.load(sums[row][v]), pointer(6, out, where, _FLOATS), align=4)
            return context.get_dummy_value()

        index = types.intp
        return types.void(x, index, index, weights, index, index, out, index, index), codegen

    return products


def _splat(builder: Any, value: Any) -> Any:
    vector = ir.VectorType(value.type, _LANES)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(_WORD, 0))
    return builder.shuffle_vector(one, one, ir.Constant(_WORDS, [0] * _LANES))


def _multiply_add(builder: Any, left: Any, right: Any, total: Any, *, is_paired: bool) -> Any:
    """Adds left * right to total; in bfloat16 two products per lane."""
    name = "llvm.x86.avx512bf16.dpbf16ps.512" if is_paired else "llvm.fma.v16f32"
    operand = _PAIRS if is_paired else _FLOATS
    kind = ir.FunctionType(_FLOATS, [_FLOATS, operand, operand] if is_paired else [_FLOATS] * 3)
    module = builder.module
    function = module.globals.get(name) or ir.Function(module, kind, name)
    if is_paired:
        return builder.call(function, [total, builder.bitcast(left, _PAIRS), builder.bitcast(right, _PAIRS)])
    return builder.call(function, [left, right, total])


_products_6, _products_4, _products_2, _products_1 = (_row_products(rows) for rows in (6, 4, 2, 1))


@exact
def multiply(
    x: Any,
    at: Any,
    stride: Any,
    rows: Any,
    weights: Any,
    place: Any,
    inputs: Any,
    panels: Any,
    out: Any,
    out_stride: Any,
) -> None:
    """out[r, n] = sum over k of x[r, k] * weight[n, k], float32, for ``panels`` x 64 outputs.

    Row r begins at ``x[at + r * stride]`` and has ``inputs`` elements (an even number); it goes to
    ``out[r * out_stride]``. ``weights[place:]``: as :func:`packed` makes it.
    """
    for panel in range(panels):
        here, to = place + panel * inputs * PANEL, panel * PANEL
        row = np.int64(0)
        while rows - row >= 6:
            _products_6(x, at + row * stride, stride, weights, here, inputs, out, to + row * out_stride, out_stride)
            row += 6
        if rows - row >= 4:
            _products_4(x, at + row * stride, stride, weights, here, inputs, out, to + row * out_stride, out_stride)
            row += 4
        if rows - row >= 2:
            _products_2(x, at + row * stride, stride, weights, here, inputs, out, to + row * out_stride, out_stride)
            row += 2
        if rows - row >= 1:
            _products_1(x, at + row * stride, stride, weights, here, inputs, out, to + row * out_stride, out_stride)


def panels_of(outputs: int) -> int:
    """How many panels hold so many outputs."""
    return -(-outputs // PANEL)


def packed(matrix: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A matrix [outputs, inputs] of native elements (float32 or the bits of bfloat16) as flat panels.

    A panel holds, input by input (pair by pair in bfloat16), the weights of its 64 outputs; the last one ends with
    zeros. ``inputs`` must be even.
    """
    outputs, inputs = matrix.shape
    full = np.zeros((panels_of(outputs) * PANEL, inputs), matrix.dtype)
    full[:outputs] = matrix
    pair = 2 if matrix.dtype == np.uint16 else 1
    parts = full.reshape(-1, PANEL, inputs // pair, pair)
    return np.ascontiguousarray(parts.transpose(0, 2, 1, 3)).reshape(-1)
