# ruff: noqa: ARG001 - an intrinsic takes what its code generator gets
"""The online softmax's step over one tile's scores, 8 lanes at a time: largest score, weights and their sum."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils

from kernels.cpu.compile import lowlevel
from kernels.cpu.lowlevel import EXP_TERMS, LN2_HIGH, LN2_LOW, LOG2E, SMALLEST
from kernels.cpu.vector import FLOATS, LANES, WORD, WORDS, load_lanes, shuffle, splat, store_lanes, variable


def _masked(context: Any, builder: Any, kind: Any, scores: Any, at: Any, span: tuple[Any, Any, Any], off: Any) -> Any:
    """8 scores from token t on, and ``off`` in place of those outside begin .. end - 1; ``span``: t, begin, end."""
    t, begin, end = (builder.trunc(value, WORD) for value in span)

    token = builder.add(splat(builder, t), ir.Constant(WORDS, list(range(LANES))))
    inside = builder.and_(
        builder.icmp_signed(">=", token, splat(builder, begin)), builder.icmp_signed("<", token, splat(builder, end))
    )
    value = load_lanes(context, builder, kind, scores, builder.add(at, span[0]))
    return inside, builder.select(inside, value, ir.Constant(FLOATS, [off] * LANES))


def _fold(builder: Any, vector: Any, join: Any) -> Any:
    """The 8 lanes joined, two halves at a time."""
    for half in (4, 2, 1):
        vector = join(vector, shuffle(builder, vector, vector, [(lane + half) % LANES for lane in range(LANES)]))
    return builder.extract_element(vector, ir.Constant(WORD, 0))


def _larger(builder: Any, left: Any, right: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", left, right), left, right)


def _exp_nonpositive(builder: Any, x: Any) -> Any:
    """As :func:`kernels.cpu.lowlevel.exp_nonpositive`, on 8 lanes."""
    module = builder.module

    def all_lanes(value: Any) -> Any:
        return ir.Constant(FLOATS, [float(np.float32(value))] * LANES)

    def call(name: str, *arguments: Any) -> Any:
        kind = ir.FunctionType(FLOATS, [FLOATS] * len(arguments))
        function = module.globals.get(name) or ir.Function(module, kind, name)
        return builder.call(function, arguments)

    # A NaN is not smaller than anything, and stays.
    small = all_lanes(SMALLEST)
    x = builder.select(builder.fcmp_ordered("<", x, small), small, x)
    n = call("llvm.floor.v8f32", call("llvm.fma.v8f32", x, all_lanes(LOG2E), all_lanes(0.5)))
    minus_n = builder.fneg(n)
    r = call("llvm.fma.v8f32", minus_n, all_lanes(LN2_HIGH), x)
    r = call("llvm.fma.v8f32", minus_n, all_lanes(LN2_LOW), r)
    p = all_lanes(EXP_TERMS[0])
    for term in EXP_TERMS[1:]:
        p = call("llvm.fma.v8f32", p, r, all_lanes(term))
    p = builder.fadd(call("llvm.fma.v8f32", p, builder.fmul(r, r), r), all_lanes(1.0))
    power = builder.add(builder.fptosi(n, WORDS), ir.Constant(WORDS, [127] * LANES))
    return builder.fmul(p, builder.bitcast(builder.shl(power, ir.Constant(WORDS, [23] * LANES)), FLOATS))


@lowlevel
def largest_score(
    typing_context: Any,
    scores: Any, at: Any, tokens: Any, begin: Any, end: Any,
) -> Any:  # fmt: skip
    """Largest of ``scores[at + t]`` for t in begin .. end - 1, -inf if there is none; ``tokens``: all, times 8."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        scores, at, tokens, begin, end = arguments
        best = variable(builder, ir.Constant(FLOATS, [float("-inf")] * LANES))
        step = ir.Constant(tokens.type, LANES)
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
        total = variable(builder, ir.Constant(FLOATS, [0.0] * LANES))
        peaks = splat(builder, peak)
        step = ir.Constant(tokens.type, LANES)
        with cgutils.for_range_slice(builder, ir.Constant(tokens.type, 0), tokens, step) as (t, _):
            inside, value = _masked(context, builder, signature.args[0], scores, at, (t, begin, end), 0.0)
            weight = _exp_nonpositive(builder, builder.fsub(value, peaks))
            weight = builder.select(inside, weight, ir.Constant(FLOATS, [0.0] * LANES))
            store_lanes(context, builder, signature.args[0], scores, builder.add(at, t), weight)
            builder.store(builder.fadd(builder.load(total), weight), total)
        return _fold(builder, builder.load(total), builder.fadd)

    return types.float32(scores, *[types.intp] * 4, types.float32), codegen
