# ruff: noqa: ARG001 - an intrinsic takes what its code generator gets
"""Products of a few rows with a packed matrix, in vector registers: a panel of outputs of several rows at a time.

A step's matrices are small, and a library spends more time on finding out what it is asked for than on the products.
Where a processor cannot multiply bfloat16 a library is worse yet; here weights become float32 on their way.
Each output adds its products in the order of the inputs, whatever rows are computed beside it, so that a row's result
does not depend on the batch, not even in the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils

from kernels.cpu.compile import exact, lowlevel


@dataclass(frozen=True)
class Tiling:
    """How much of a product is in registers at once: ``vectors`` of ``lanes`` float32 for each of ``rows`` rows.

    ``has_dots``: the processor adds products of bfloat16 pairs by itself.
    """

    lanes: int
    vectors: int
    rows: int
    has_dots: bool

    @property
    def panel(self) -> int:
        """Outputs that lie together, and are computed together."""
        return self.lanes * self.vectors


_AVX2 = Tiling(lanes=8, vectors=3, rows=4, has_dots=False)


def tiling_for(features: Mapping[str, bool]) -> Tiling | None:
    """Of a processor with these features (LLVM's names); None: there are no products for it."""
    if features.get("avx512f", False):
        return Tiling(lanes=16, vectors=4, rows=6, has_dots=features.get("avx512bf16", False))
    if features.get("avx2", False) and features.get("fma", False):
        return _AVX2
    return None


HERE = tiling_for(binding.get_host_cpu_features())
TILING = HERE or _AVX2  # compiled only where it is called
PANEL = TILING.panel
_WORD = ir.IntType(32)
_BF16 = types.uint16
_HIGH_HALF = -65536  # of a word


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


def row_products(rows: int, tiling: Tiling) -> Callable[..., Any]:
    """An intrinsic for ``rows`` rows and one panel.

    ``(x, at, stride, weights, place, inputs, out, to, out_stride)``: row r begins at ``x[at + r * stride]``, the panel
    at ``weights[place]``; its outputs, float32, go to ``out[to + r * out_stride]``. ``x``: as
    :func:`kernels.cpu.operands.operands_like` has it.
    """
    lanes, vectors, width = tiling.lanes, tiling.vectors, tiling.panel
    floats = ir.VectorType(ir.FloatType(), lanes)
    words = ir.VectorType(_WORD, lanes)

    @lowlevel
    def products(
        typing_context: Any,
        x: Any, at: Any, stride: Any, weights: Any, place: Any, inputs: Any, out: Any, to: Any, out_stride: Any,
    ) -> Any:  # fmt: skip
        if weights.dtype not in (types.float32, _BF16) or out.dtype != types.float32:
            return None
        is_paired = weights.dtype == _BF16
        are_dots = is_paired and tiling.has_dots
        if x.dtype != (_BF16 if are_dots else types.float32):
            return None

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            kinds = signature.args
            x, at, stride, weights, place, inputs, out, to, out_stride = arguments
            index = at.type

            def pointer(position: int, array: Any, where: Any, kind: Any) -> Any:
                data = context.make_array(kinds[position])(context, builder, value=array).data
                return builder.bitcast(builder.gep(data, [where]), kind.as_pointer())

            def constant(value: int) -> Any:
                return ir.Constant(index, value)

            zero = ir.Constant(floats, [0.0] * lanes)
            sums = [[cgutils.alloca_once_value(builder, zero) for _ in range(vectors)] for _ in range(rows)]  # type: ignore[no-untyped-call]
            starts = [builder.add(at, builder.mul(constant(row), stride)) for row in range(rows)]
            per_step = 2 if is_paired else 1  # inputs
            with cgutils.for_range(builder, builder.udiv(inputs, constant(per_step))) as loop:
                first = builder.mul(loop.index, constant(per_step))
                panel = builder.add(place, builder.mul(first, constant(width)))
                kind = words if is_paired else floats
                line = [
                    builder.load(pointer(3, weights, builder.add(panel, constant(v * lanes * per_step)), kind), align=4)
                    for v in range(vectors)
                ]
                for half in range(1 if are_dots else per_step):
                    lefts = [_left(builder, one, half, is_paired=is_paired, are_dots=are_dots) for one in line]
                    for row in range(rows):
                        where = builder.add(builder.add(starts[row], first), constant(half))
                        source = pointer(0, x, where, _WORD if are_dots else ir.FloatType())
                        right = _splat(builder, builder.load(source, align=2 if are_dots else 4), lanes)
                        for v in range(vectors):
                            total = builder.load(sums[row][v])
                            builder.store(_multiply_add(builder, lefts[v], right, total), sums[row][v])
            for row in range(rows):
                for v in range(vectors):
                    where = builder.add(builder.add(to, builder.mul(constant(row), out_stride)), constant(v * lanes))
                    builder.store(builder.load(sums[row][v]), pointer(6, out, where, floats), align=4)
            return context.get_dummy_value()

        index = types.intp
        return types.void(x, index, index, weights, index, index, out, index, index), codegen

    return products


def _left(builder: Any, words: Any, half: int, *, is_paired: bool, are_dots: bool) -> Any:
    """What is multiplied of a vector of weights: all of it, or the first or second of each pair, as float32."""
    if not is_paired or are_dots:
        return words
    lanes = words.type.count
    if half:
        bits = builder.and_(words, ir.Constant(words.type, [_HIGH_HALF] * lanes))
    else:
        bits = builder.shl(words, ir.Constant(words.type, [16] * lanes))
    return builder.bitcast(bits, ir.VectorType(ir.FloatType(), lanes))


def _splat(builder: Any, value: Any, lanes: int) -> Any:
    vector = ir.VectorType(value.type, lanes)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(_WORD, 0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(_WORD, lanes), [0] * lanes))


def _multiply_add(builder: Any, left: Any, right: Any, total: Any) -> Any:
    """Adds left * right to total; of words, which are pairs of bfloat16, both products."""
    lanes = total.type.count
    if left.type != total.type:
        pairs = ir.VectorType(_BFloat(), 2 * lanes)
        given = [total, builder.bitcast(left, pairs), builder.bitcast(right, pairs)]
        name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * lanes}"
    else:
        given = [left, right, total]
        name = f"llvm.fma.v{lanes}f32"
    module = builder.module
    kind = ir.FunctionType(total.type, [one.type for one in given])
    function = module.globals.get(name) or ir.Function(module, kind, name)
    return builder.call(function, given)


_MOST = TILING.rows
_products_most, _products_4, _products_2, _products_1 = (row_products(rows, TILING) for rows in (_MOST, 4, 2, 1))


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
    """out[r, n] = sum over k of x[r, k] * weight[n, k], float32, for ``panels`` x PANEL outputs.

    Row r begins at ``x[at + r * stride]`` and has ``inputs`` elements (an even number); it goes to
    ``out[r * out_stride]``. ``weights[place:]``: as :func:`packed` makes it.
    """
    for panel in range(panels):
        here, to = place + panel * inputs * PANEL, panel * PANEL
        row = np.int64(0)
        while rows - row >= _MOST:
            _products_most(x, at + row * stride, stride, weights, here, inputs, out, to + row * out_stride, out_stride)
            row += _MOST
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

    A panel holds, input by input (pair by pair in bfloat16), the weights of its outputs; the last one ends with
    zeros. ``inputs`` must be even.
    """
    outputs, inputs = matrix.shape
    full = np.zeros((panels_of(outputs) * PANEL, inputs), matrix.dtype)
    full[:outputs] = matrix
    pair = 2 if matrix.dtype == np.uint16 else 1
    parts = full.reshape(-1, PANEL, inputs // pair, pair)
    return np.ascontiguousarray(parts.transpose(0, 2, 1, 3)).reshape(-1)
