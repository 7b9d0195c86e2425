"""Closed loops without HTTP: every format, prompts of 128 and 2,048 tokens, outputs of 64."""

from __future__ import annotations

from typing import Any

from engine.bench.context import Context
from engine.bench.engines import build, closed_loop
from engine.bench.shapes import REFERENCE, make_model

_PROMPTS, _OUTPUT = (128, 2048), 64


def run(context: Context) -> dict[str, Any]:
    folder = make_model(context.folder / "reference", REFERENCE)
    result: dict[str, Any] = {}
    for kv_format in context.formats:
        values = {"kv_format": kv_format, "block_size": 16 if kv_format == "native" else 32}
        for prompt in _PROMPTS[:1] if context.quick else _PROMPTS:
            for concurrency in context.concurrency:
                engine = build(folder, context.now_ns, pool_bytes=2 << 30, values=values, is_timed=False)
                closed_loop(engine, 1, 1, prompt, 8)
                requests = concurrency * (2 if context.quick else 4)
                figures = closed_loop(engine, concurrency, requests, prompt, _OUTPUT)
                name = f"{kv_format}/{prompt}/{concurrency}"
                result[name] = figures.to_json()
                context.log(f"  {name}: {result[name]}")
    return {"throughput": result}
