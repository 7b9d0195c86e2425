"""Step time against resident blocks: held by what decodes itself (bookkeeping alone), and cached beside it."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from engine.bench.context import Context
from engine.bench.engines import BenchEngine, build, decode_steps
from engine.bench.shapes import TINY_KV, make_model
from engine.plan import RecodeBatch, SequenceOutput, StepPlan

_BLOCKS = (100, 1_000, 10_000, 100_000)
_BATCH, _BLOCK_TOKENS = 8, 16
_ROUNDS = 3


def run(context: Context) -> dict[str, Any]:
    folder = make_model(context.folder / "tiny-kv", TINY_KV)
    steps = 20 if context.quick else 100
    sizes = _BLOCKS[:3] if context.quick else _BLOCKS
    cached, held = {}, {}
    for blocks in sizes:
        engine = build(folder, context.now_ns, pool_bytes=(blocks + 4_000) * 4096)
        _fill(engine, blocks)
        beside = median(decode_steps(engine, _BATCH, 64, steps) for _ in range(_ROUNDS))
        cached[str(blocks)] = round(beside / 1e3, 1)
        held[str(blocks)] = round(_held(engine, blocks, steps) / 1e3, 1)
        context.log(f"  {blocks} blocks: {cached[str(blocks)]} us beside them, {held[str(blocks)]} us of bookkeeping")
    last, reference = str(sizes[-1]), str(sizes[1])
    return {
        "resident_cached_us": cached,
        "resident_held_us": held,
        "resident_ratio": round(cached[last] / cached[reference], 3),
        "resident_held_ratio": round(held[last] / held[reference], 3),
    }


def _fill(engine: BenchEngine, blocks: int) -> None:
    """Leave so many blocks in the prefix cache; nothing is computed for it."""
    cache = engine.cache
    for start in range(0, blocks, 1000):
        tokens = min(1000, blocks - start) * _BLOCK_TOKENS
        request = engine.request(tokens, 1)
        if not cache.allocate(request, tokens):
            raise RuntimeError(f"no room for {blocks} blocks")
        cache.commit(request, tokens)
        cache.free(request)


class _NoModel:
    """Builds a step's inputs and computes nothing."""

    def __init__(self, engine: BenchEngine) -> None:
        self._runner = engine.runner
        self.last_work = engine.runner.last_work

    def recode(self, batches: Sequence[RecodeBatch]) -> None:
        self._runner.recode(batches)

    def execute(self, plan: StepPlan, cache: Any) -> list[SequenceOutput]:
        if plan.sequences:
            self._runner._builder.build(plan.sequences, cache)
        return [SequenceOutput(part.request, 7 if part.samples else None) for part in plan.sequences]


def _held(engine: BenchEngine, blocks: int, steps: int) -> float:
    """Median nanoseconds of a step's bookkeeping over sequences that hold so many blocks together."""
    engine.cache.drop_idle()
    engine.core._runner = _NoModel(engine)
    prompt = max(16, blocks * _BLOCK_TOKENS // _BATCH - 256)
    return median(decode_steps(engine, _BATCH, prompt, steps) for _ in range(_ROUNDS))
