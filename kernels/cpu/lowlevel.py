"""What the CPU kernels need below Numba's arrays: typed loads from the arena, and a vectorisable exponential.

The native dtype travels as the dtype of an array over the same bytes: float32 as float32, bfloat16 as uint16, float16
as int16. One source then serves all three, specialised by the compiler, and no 2-byte arithmetic is ever needed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from kernels.cpu.compile import exact, lowlevel

_FLOAT = ir.FloatType()
_BF16, _FP16 = types.uint16, types.int16
# What arrays may hold: float32, codes, the bits of a bfloat16, those of a float16.
ELEMENTS = (types.float32, types.uint8, _BF16, _FP16)


@lowlevel
def load(typing_context: Any, array: Any, index: Any) -> Any:  # noqa: ARG001
    """``array[index]`` as float32, without wraparound or bounds check.

    Elements: float32, uint16 (bits of a bfloat16), int16 (bits of a float16) or uint8 (a code).
    """
    element = array.dtype
    if element not in ELEMENTS:
        return None

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, value=arguments[0]).data
        raw = builder.load(builder.gep(data, [arguments[1]]))
        if element == types.float32:
            return raw
        if element == types.uint8:
            return builder.uitofp(raw, _FLOAT)
        if element == _BF16:
            wide = builder.shl(builder.zext(raw, ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
            return builder.bitcast(wide, _FLOAT)
        return builder.fpext(builder.bitcast(raw, ir.HalfType()), _FLOAT)

    return types.float32(array, types.intp), codegen


@lowlevel
def load_nibbles(typing_context: Any, array: Any, index: Any) -> Any:  # noqa: ARG001
    """Low and high half of byte ``array[index]`` as two float32, without wraparound or bounds check."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, value=arguments[0]).data
        packed = builder.load(builder.gep(data, [arguments[1]]))
        low = builder.and_(packed, ir.Constant(ir.IntType(8), 15))
        high = builder.lshr(packed, ir.Constant(ir.IntType(8), 4))
        return context.make_tuple(
            builder, signature.return_type, (builder.uitofp(low, _FLOAT), builder.uitofp(high, _FLOAT))
        )

    pair = types.UniTuple(types.float32, 2)  # type: ignore[no-untyped-call]
    return pair(array, types.intp), codegen


@lowlevel
def store(typing_context: Any, array: Any, index: Any, value: Any) -> Any:  # noqa: ARG001
    """``array[index] = value`` of equal types, without wraparound or bounds check (both keep LLVM from vectorising)."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, value=arguments[0]).data
        builder.store(arguments[2], builder.gep(data, [arguments[1]]))
        return context.get_dummy_value()

    return types.void(array, types.intp, array.dtype), codegen


@lowlevel
def prefetch(typing_context: Any, array: Any, index: Any) -> Any:  # noqa: ARG001
    """Ask for the cache line of ``array[index]``; never faults."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, value=arguments[0]).data
        pointer = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(8).as_pointer())
        word = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, word, word, word])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], kind)
        builder.call(function, [pointer, ir.Constant(word, 0), ir.Constant(word, 3), ir.Constant(word, 1)])
        return context.get_dummy_value()

    return types.void(array, types.intp), codegen


@lowlevel
def move_bytes(typing_context: Any, target: Any, place: Any, source: Any, start: Any, size: Any) -> Any:  # noqa: ARG001
    """``target[place : place + size] = source[start : start + size]`` for uint8 arrays, without bounds check."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def at(array: int, index: int) -> Any:
            data = context.make_array(signature.args[array])(context, builder, value=arguments[array]).data
            return builder.gep(data, [arguments[index]])

        byte, word = ir.IntType(8).as_pointer(), ir.IntType(64)
        kind = ir.FunctionType(ir.VoidType(), [byte, byte, word, ir.IntType(1)])
        function = builder.module.declare_intrinsic("llvm.memmove", [byte, byte, word], kind)
        builder.call(function, [at(0, 1), at(2, 3), arguments[4], ir.Constant(ir.IntType(1), 0)])
        return context.get_dummy_value()

    return types.void(target, types.int64, source, types.int64, types.int64), codegen


@lowlevel
def float_from_bits(typing_context: Any, bits: Any) -> Any:  # noqa: ARG001
    """The float32 with the given int32 bits."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        return builder.bitcast(arguments[0], _FLOAT)

    return types.float32(types.int32), codegen


@lowlevel
def fma(typing_context: Any, factor: Any, other: Any, addend: Any) -> Any:  # noqa: ARG001
    """``factor * other + addend`` in float32 with one rounding, whatever the flags of the caller."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), codegen


LOG2E = np.float32(1.4426950408889634)
LN2_HIGH = np.float32(0.693359375)  # few bits, so that n * LN2_HIGH is exact
LN2_LOW = np.float32(-2.12194440e-4)
SMALLEST = np.float32(-87.0)
# Of the polynomial for (exp(r) - 1 - r) / r^2.
EXP_TERMS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


@exact
def exp_nonpositive(x: Any) -> Any:
    """exp(x) for float32 x <= 0, to 2 units in the last place; below -87 it stays at 1.6e-38, NaN stays NaN.

    Cephes' expf: 2^n times a polynomial on the rest. Only additions, multiplications and one integer shift, so that
    LLVM vectorises it (a call of libm's is not). No fast-math here: reassociation would undo the two-part ln 2.
    """
    x = max(x, SMALLEST)
    n = np.floor(x * LOG2E + np.float32(0.5))
    r = fma(-n, LN2_LOW, fma(-n, LN2_HIGH, x))
    p = np.float32(1.9875691500e-4)
    p = fma(p, r, np.float32(1.3981999507e-3))
    p = fma(p, r, np.float32(8.3334519073e-3))
    p = fma(p, r, np.float32(4.1665795894e-2))
    p = fma(p, r, np.float32(1.6666665459e-1))
    p = fma(p, r, np.float32(5.0000001201e-1))
    p = fma(p, r * r, r) + np.float32(1.0)
    return p * float_from_bits((np.int32(n) + np.int32(127)) << np.int32(23))


@lowlevel
def native_round_up(typing_context: Any, array: Any, value: Any) -> Any:  # noqa: ARG001
    """Smallest element of ``array``'s native dtype that is >= the non-negative float32 ``value``."""
    element = array.dtype
    if element not in (types.float32, _BF16, _FP16):
        return None

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        if element == types.float32:
            return arguments[1]
        if element == _BF16:
            # Adding all ones below the kept half carries into it unless they are all zero.
            word = ir.IntType(32)
            bits = builder.add(builder.bitcast(arguments[1], word), ir.Constant(word, 0xFFFF))
            return builder.trunc(builder.lshr(bits, ir.Constant(word, 16)), ir.IntType(16))
        half = builder.fptrunc(arguments[1], ir.HalfType())
        low = builder.fcmp_ordered("<", builder.fpext(half, _FLOAT), arguments[1])
        return builder.add(builder.bitcast(half, ir.IntType(16)), builder.zext(low, ir.IntType(16)))

    return element(array, types.float32), codegen


@lowlevel
def native_exact(typing_context: Any, array: Any, value: Any) -> Any:  # noqa: ARG001
    """The element of ``array``'s native dtype that equals the float32 ``value``, which must be representable."""
    element = array.dtype
    if element not in (types.float32, _BF16, _FP16):
        return None

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        if element == types.float32:
            return arguments[1]
        if element == _BF16:
            word = ir.IntType(32)
            bits = builder.lshr(builder.bitcast(arguments[1], word), ir.Constant(word, 16))
            return builder.trunc(bits, ir.IntType(16))
        return builder.bitcast(builder.fptrunc(arguments[1], ir.HalfType()), ir.IntType(16))

    return element(array, types.float32), codegen


@lowlevel
def native_nearest(typing_context: Any, array: Any, value: Any) -> Any:  # noqa: ARG001
    """The element of ``array``'s native dtype that is nearest to the float32 ``value``, ties to even, as torch's."""
    element = array.dtype
    if element not in (types.float32, _BF16, _FP16):
        return None

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        value = arguments[1]
        if element == types.float32:
            return value
        if element == _FP16:
            return builder.bitcast(builder.fptrunc(value, ir.HalfType()), ir.IntType(16))
        word = ir.IntType(32)
        bits = builder.bitcast(value, word)
        odd = builder.and_(builder.lshr(bits, ir.Constant(word, 16)), ir.Constant(word, 1))
        rounded = builder.add(bits, builder.add(odd, ir.Constant(word, 0x7FFF)))
        # Rounding could carry a NaN into a zero.
        is_nan = builder.fcmp_unordered("uno", value, value)
        kept = builder.select(is_nan, ir.Constant(word, 0x7FC00000), rounded)
        return builder.trunc(builder.lshr(kept, ir.Constant(word, 16)), ir.IntType(16))

    return element(array, types.float32), codegen
