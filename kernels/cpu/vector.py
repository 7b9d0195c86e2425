# ruff: noqa: ARG001 - an intrinsic takes what its code generator gets
"""Small matrix products in registers, written as vectors: LLVM's vectoriser does not find them in loops.

Vectors have 8 lanes, or 16 where the processor has AVX-512; 8 of them accumulate, so that 16 registers are enough and
the latency of multiply-add is hidden. Each accumulator's order of additions is fixed, whatever its neighbours do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils

from kernels.cpu.compile import lowlevel
from kernels.cpu.lowlevel import ELEMENTS

LANES = 8  # of float32; head_dim is a multiple of it
# Lanes where head_dim is a multiple of them, too.
WIDE = 16 if binding.get_host_cpu_features().get("avx512f", False) else LANES
WORD = ir.IntType(32)
_CONTRACT = ("contract",)


def floats(lanes: int) -> Any:
    return ir.VectorType(ir.FloatType(), lanes)


def words(lanes: int) -> Any:
    return ir.VectorType(WORD, lanes)


def _at(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    return builder.gep(context.make_array(kind)(context, builder, value=array).data, [index])


def load_lanes(context: Any, builder: Any, kind: Any, array: Any, index: Any, lanes: int) -> Any:
    """``array[index : index + lanes]`` as float32; elements: those of :func:`kernels.cpu.lowlevel.load`."""
    element = context.get_data_type(kind.dtype)
    size = kind.dtype.bitwidth // 8
    vector = ir.VectorType(element, lanes)
    raw = builder.load(builder.bitcast(_at(context, builder, kind, array, index), vector.as_pointer()), align=size)
    if kind.dtype == types.float32:
        return raw
    if kind.dtype == types.uint8:
        return builder.sitofp(builder.zext(raw, words(lanes)), floats(lanes))
    if kind.dtype == types.uint16:
        wide = builder.zext(raw, words(lanes))
        return builder.bitcast(builder.shl(wide, ir.Constant(wide.type, [16] * lanes)), floats(lanes))
    return builder.fpext(builder.bitcast(raw, ir.VectorType(ir.HalfType(), lanes)), floats(lanes))


def load_row_lanes(
    context: Any, builder: Any, kind: Any, array: Any, index: Any, lanes: int, *, packed: bool
) -> list[Any]:
    """Elements of a row from ``array[index]`` on; ``packed``: bytes of 4-bit codes, their low and high halves."""
    if not packed:
        return [load_lanes(context, builder, kind, array, index, lanes)]
    kind_of_bytes = ir.VectorType(context.get_data_type(kind.dtype), lanes).as_pointer()
    raw = builder.load(builder.bitcast(_at(context, builder, kind, array, index), kind_of_bytes), align=1)
    wide = builder.zext(raw, words(lanes))
    low = builder.and_(wide, ir.Constant(wide.type, [15] * lanes))
    high = builder.lshr(wide, ir.Constant(wide.type, [4] * lanes))
    return [builder.sitofp(half, floats(lanes)) for half in (low, high)]


def store_lanes(context: Any, builder: Any, kind: Any, array: Any, index: Any, value: Any) -> None:
    at = builder.bitcast(_at(context, builder, kind, array, index), value.type.as_pointer())
    builder.store(value, at, align=4)


def variable(builder: Any, value: Any) -> Any:
    """A place that holds ``value``; LLVM turns it into a register."""
    return cgutils.alloca_once_value(builder, value)  # type: ignore[no-untyped-call]


def splat(builder: Any, value: Any, lanes: int) -> Any:
    """A scalar in all lanes."""
    vector = ir.VectorType(value.type, lanes)
    lane = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(WORD, 0))
    return shuffle(builder, lane, lane, [0] * lanes)


def _add_product(builder: Any, accumulator: Any, left: Any, right: Any) -> None:
    product = builder.fmul(left, right, flags=_CONTRACT)
    builder.store(builder.fadd(builder.load(accumulator), product, flags=_CONTRACT), accumulator)


def shuffle(builder: Any, left: Any, right: Any, lanes: Sequence[int]) -> Any:
    return builder.shuffle_vector(left, right, ir.Constant(ir.VectorType(WORD, len(lanes)), list(lanes)))


def _lane_sums(builder: Any, vectors: Sequence[Any]) -> Any:
    """The sums of the lanes of 4 or 8 vectors, as one vector in their order. Shuffles stay within 128 bits at first."""
    if vectors[0].type.count > LANES:
        lows = [shuffle(builder, one, one, range(LANES)) for one in vectors]
        highs = [shuffle(builder, one, one, range(LANES, 2 * LANES)) for one in vectors]
        vectors = [builder.fadd(low, high) for low, high in zip(lows, highs, strict=True)]
    even, odd = (0, 2, 8, 10, 4, 6, 12, 14), (1, 3, 9, 11, 5, 7, 13, 15)

    def halve(rest: Sequence[Any]) -> list[Any]:
        pairs = zip(rest[::2], rest[1::2], strict=True)
        return [builder.fadd(shuffle(builder, a, b, even), shuffle(builder, a, b, odd)) for a, b in pairs]

    fours = halve(halve(vectors))
    first, second = fours[0], fours[-1]
    lower, upper = (0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)
    taken = LANES if len(fours) > 1 else LANES // 2
    return builder.fadd(shuffle(builder, first, second, lower[:taken]), shuffle(builder, first, second, upper[:taken]))


def dot_products(heads: int, keys: int, lanes: int, *, packed: bool = False) -> Any:
    """An intrinsic for the products of ``heads`` queries with ``keys`` keys; heads x keys is 4 or 8.

    ``(query, q, head_dim, rows, start, first, last, scores, at, stride)``: query g is at ``query[q + g * head_dim]``;
    key t is row ``min(first + t, last)`` of ``rows``, which begins at ``start``; the product goes to
    ``scores[at + g * stride + t]``. ``packed``: rows are 4-bit codes, channel c in the low half of byte c and channel
    head_dim / 2 + c in the high one. A row is a multiple of ``lanes`` elements (bytes).
    """
    parts = 2 if packed else 1

    @lowlevel
    def dot(
        typing_context: Any,
        query: Any, q: Any, head_dim: Any, rows: Any, start: Any, first: Any, last: Any,
        scores: Any, at: Any, stride: Any,
    ) -> Any:  # fmt: skip
        if rows.dtype not in ELEMENTS:
            return None

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            kinds = signature.args
            query, q, head_dim, rows, start, first, last, scores, at, stride = arguments
            width = builder.udiv(head_dim, ir.Constant(head_dim.type, parts))  # of a row, in elements
            zero = ir.Constant(floats(lanes), [0.0] * lanes)
            sums = [[variable(builder, zero) for _ in range(keys)] for _ in range(heads)]
            places = []
            for t in range(keys):
                row = builder.add(first, ir.Constant(first.type, t))
                row = builder.select(builder.icmp_signed("<", row, last), row, last)
                places.append(builder.add(start, builder.mul(row, width)))
            lines = [builder.add(q, builder.mul(ir.Constant(q.type, g), head_dim)) for g in range(heads)]
            step = ir.Constant(head_dim.type, lanes)
            with cgutils.for_range_slice(builder, ir.Constant(head_dim.type, 0), width, step) as (d, _):
                columns = [builder.add(d, builder.mul(width, ir.Constant(width.type, part))) for part in range(parts)]
                lefts = [
                    [load_lanes(context, builder, kinds[0], query, builder.add(line, column), lanes) for line in lines]
                    for column in columns
                ]
                for t in range(keys):
                    place = builder.add(places[t], d)
                    rights = load_row_lanes(context, builder, kinds[3], rows, place, lanes, packed=packed)
                    for part, right in enumerate(rights):
                        for g in range(heads):
                            _add_product(builder, sums[g][t], lefts[part][g], right)
            total = _lane_sums(builder, [builder.load(one) for line in sums for one in line])
            for g in range(heads):
                part = shuffle(builder, total, total, range(g * keys, (g + 1) * keys))
                place = builder.add(at, builder.mul(ir.Constant(at.type, g), stride))
                store_lanes(context, builder, kinds[7], scores, place, part)
            return context.get_dummy_value()

        index = types.intp
        return types.void(query, index, index, rows, index, index, index, scores, index, index), codegen

    return dot


def weighted_rows(heads: int, vectors: int, lanes: int, *, packed: bool = False) -> Any:
    """An intrinsic that adds to ``heads`` sums the rows of a matrix times weights, for ``vectors`` x ``lanes`` columns.

    ``(weights, w, stride, rows, start, count, head_dim, column, sums, at)``: weight of row t for sum g is
    ``weights[w + g * stride + t]``; row t begins at ``rows[start + t * head_dim]``, sum g at
    ``sums[at + g * head_dim]``. ``packed``: as :func:`dot_products`; columns are of bytes, each of two channels.
    """
    parts = 2 if packed else 1

    @lowlevel
    def add(
        typing_context: Any,
        weights: Any, w: Any, stride: Any, rows: Any, start: Any, count: Any, head_dim: Any, column: Any,
        sums: Any, at: Any,
    ) -> Any:  # fmt: skip
        if rows.dtype not in ELEMENTS:
            return None

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            kinds = signature.args
            weights, w, stride, rows, start, count, head_dim, column, sums, at = arguments
            width = builder.udiv(head_dim, ir.Constant(head_dim.type, parts))

            def place(g: int, vector: int) -> Any:
                """Of a vector of sums; those of the low halves and of the high ones take turns."""
                line = builder.add(at, builder.mul(ir.Constant(at.type, g), head_dim))
                line = builder.add(line, builder.mul(width, ir.Constant(width.type, vector % parts)))
                return builder.add(builder.add(line, column), ir.Constant(at.type, vector // parts * lanes))

            added = [
                [
                    variable(builder, load_lanes(context, builder, kinds[8], sums, place(g, vector), lanes))
                    for vector in range(vectors * parts)
                ]
                for g in range(heads)
            ]
            with cgutils.for_range(builder, count) as loop:
                t = loop.index
                row = builder.add(builder.add(start, column), builder.mul(t, width))
                values = []
                for vector in range(vectors):
                    index = builder.add(row, ir.Constant(row.type, vector * lanes))
                    values += load_row_lanes(context, builder, kinds[3], rows, index, lanes, packed=packed)
                for g in range(heads):
                    index = builder.add(builder.add(w, t), builder.mul(ir.Constant(w.type, g), stride))
                    factor = splat(builder, builder.load(_at(context, builder, kinds[0], weights, index)), lanes)
                    for total, value in zip(added[g], values, strict=True):
                        _add_product(builder, total, factor, value)
            for g in range(heads):
                for vector, total in enumerate(added[g]):
                    store_lanes(context, builder, kinds[8], sums, place(g, vector), builder.load(total))
            return context.get_dummy_value()

        index = types.intp
        return types.void(weights, index, index, rows, index, index, index, index, sums, index), codegen

    return add
