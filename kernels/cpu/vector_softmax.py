# ruff: noqa: ARG001 - an intrinsic takes what its code generator gets
"""The online softmax's step over one tile's scores, a register at a time: largest score, weights, their sum."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils

from kernels.cpu.compile import lowlevel
from kernels.cpu.lowlevel import EXP_TERMS, LN2_HIGH, LN2_LOW, LOG2E, SMALLEST
from kernels.cpu.vector import WIDE, WORD, floats, load_lanes, shuffle, splat, store_lanes, variable, words

_FLOATS, _WORDS = floats(WIDE), words(WIDE)


def _masked(context: Any, builder: Any, kind: Any, scores: Any, at: Any, span: tuple[Any, Any, Any], off: Any) -> Any:
    """Scores from token t on, and ``off`` in place of those outside begin .. end - 1; ``span``: t, begin, end."""
    t, begin, end = (builder.trunc(value, WORD) for value in span)

    token = builder.add(splat(builder, t, WIDE), ir.Constant(_WORDS, list(range(WIDE))))
    inside = builder.and_(
        builder.icmp_signed(">=", token, splat(builder, begin, WIDE)),
        builder.icmp_signed("<", token, splat(builder, end, WIDE)),
    )
    value = load_lanes(context, builder, kind, scores, builder.add(at, span[0]), WIDE)
    return inside, builder.select(inside, value, ir.Constant(_FLOATS, [off] * WIDE))


def _fold(builder: Any, vector: Any, join: Any) -> Any:
    """The lanes joined, two halves at a time."""
    for half in (8, 4, 2, 1) if WIDE > 8 else (4, 2, 1):
        vector = join(vector, shuffle(builder, vector, vector, [(lane + half) % WIDE for lane in range(WIDE)]))
    return builder.extract_element(vector, ir.Constant(WORD, 0))


def _larger(builder: Any, left: Any, right: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", left, right), left, right)


def _exp_nonpositive(builder: Any, x: Any) -> Any:
    """As :func:`kernels.cpu.lowlevel.exp_nonpositive`, on all lanes."""
    module = builder.module

    def all_lanes(value: Any) -> Any:
        return ir.Constant(_FLOATS, [float(np.float32(value))] * WIDE)

    def call(name: str, *arguments: Any) -> Any:
        kind = ir.FunctionType(_FLOATS, [_FLOATS] * len(arguments))
        function = module.globals.get(name) or ir.Function(module, kind, name)
        return builder.call(function, arguments)

    # A NaN is not smaller than anything, and stays.
    small = all_lanes(SMALLEST)
    x = builder.select(builder.fcmp_ordered("<", x, small), small, x)
    n = call(f"llvm.floor.v{WIDE}f32", call(f"llvm.fma.v{WIDE}f32", x, all_lanes(LOG2E), all_lanes(0.5)))
    minus_n = builder.fneg(n)
    r = call(f"llvm.fma.v{WIDE}f32", minus_n, all_lanes(LN2_HIGH), x)
    r = call(f"llvm.fma.v{WIDE}f32", minus_n, all_lanes(LN2_LOW), r)
    p = all_lanes(EXP_TERMS[0])
    for term in EXP_TERMS[1:]:
        p = call(f"llvm.fma.v{WIDE}f32", p, r, all_lanes(term))
    p = builder.fadd(call(f"llvm.fma.v{WIDE}f32", p, builder.fmul(r, r), r), all_lanes(1.0))
    power = builder.add(builder.fptosi(n, _WORDS), ir.Constant(_WORDS, [127] * WIDE))
    return builder.fmul(p, builder.bitcast(builder.shl(power, ir.Constant(_WORDS, [23] * WIDE)), _FLOATS))


@lowlevel
def largest_score(
    typing_context: Any,
    scores: Any, at: Any, tokens: Any, begin: Any, end: Any,
) -> Any:  # fmt: skip
    """Largest of ``scores[at + t]`` for t in begin .. end - 1, or -inf; ``tokens``: all, a multiple of WIDE."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        scores, at, tokens, begin, end = arguments
        best = variable(builder, ir.Constant(_FLOATS, [float("-inf")] * WIDE))
        step = ir.Constant(tokens.type, WIDE)
        with cgutils.for_range_slice(builder, ir.Constant(tokens.type, 0), tokens, step) as (t, _):
            _, value = _masked(context, builder, signature.args[0], scores, at, (t, begin, end), float("-inf"))
            builder.store(_larger(builder, value, builder.load(best)), best)
        return _fold(builder, builder.load(best), lambda left, right: _larger(builder, left, right))

    return types.float32(scores, *[types.intp] * 4), codegen


@lowlevel
def weigh_scores(
    typing_context: Any,
    scores: Any, at: Any, tokens: Any, begin: Any, end: Any, peak: Any,
) -> Any:  # fmt: skip
    """Turn ``scores[at + t]`` into exp(score - peak), into 0 outside begin .. end - 1; returns their sum."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        scores, at, tokens, begin, end, peak = arguments
        total = variable(builder, ir.Constant(_FLOATS, [0.0] * WIDE))
        peaks = splat(builder, peak, WIDE)
        step = ir.Constant(tokens.type, WIDE)
        with cgutils.for_range_slice(builder, ir.Constant(tokens.type, 0), tokens, step) as (t, _):
            inside, value = _masked(context, builder, signature.args[0], scores, at, (t, begin, end), 0.0)
            weight = _exp_nonpositive(builder, builder.fsub(value, peaks))
            weight = builder.select(inside, weight, ir.Constant(_FLOATS, [0.0] * WIDE))
            store_lanes(context, builder, signature.args[0], scores, builder.add(at, t), weight)
            builder.store(builder.fadd(builder.load(total), weight), total)
        return _fold(builder, builder.load(total), builder.fadd)

    return types.float32(scores, *[types.intp] * 4, types.float32), codegen
