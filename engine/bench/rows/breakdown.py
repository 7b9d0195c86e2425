"""Where a decode step's time goes, by part, at each concurrency: reference model, contexts of about 160 tokens."""

from __future__ import annotations

from typing import Any

from engine.bench.context import Context
from engine.bench.engines import build, decode_steps
from engine.bench.shapes import REFERENCE, make_model

_PROMPT = 144
_OUTSIDE = ("schedule", "tables", "results", "emit", "sampling", "rest")


def run(context: Context) -> dict[str, Any]:
    folder = make_model(context.folder / "reference", REFERENCE)
    steps, result = 20 if context.quick else 200, {}
    for batch in context.concurrency:
        engine = build(folder, context.now_ns, pool_bytes=256 << 20)
        step_ns = decode_steps(engine, batch, _PROMPT, steps)
        parts = engine.parts.spent_us(steps)
        total = sum(parts.values())
        outside = sum(parts.get(name, 0.0) for name in _OUTSIDE) / total
        result[str(batch)] = {"step_us": round(step_ns / 1e3, 1), "parts_us": parts, "outside_model": round(outside, 3)}
        context.log(f"  {batch}: {result[str(batch)]}")
    return {"breakdown": result}
