"""Closed loops over HTTP: tokens a second by the wall clock, and what a token costs which thread of the server."""

from __future__ import annotations

import asyncio
from typing import Any

from engine.bench.client import Target, closed_loop, prompts
from engine.bench.context import Context
from engine.bench.server import serving
from engine.bench.shapes import REFERENCE, make_model

_PROMPT, _OUTPUT = 128, 64


def run(context: Context) -> dict[str, Any]:
    folder = make_model(context.folder / "reference", REFERENCE)
    result: dict[str, Any] = {}
    with serving(folder, "--kv-pool-bytes", "256M", "--max-waiting", "4096") as server:
        target = Target("127.0.0.1", server.port, "bench")
        asyncio.run(closed_loop(target, 1, prompts(2, _PROMPT, REFERENCE["vocab_size"], 0), _OUTPUT))
        for concurrency in context.concurrency:
            number = max(concurrency, 4) * (2 if context.quick else 8)
            waiting = prompts(number, _PROMPT, REFERENCE["vocab_size"], concurrency)
            http_s, engine_s = server.processor_s()
            loop = asyncio.run(closed_loop(target, concurrency, waiting, _OUTPUT))
            http_after_s, engine_after_s = server.processor_s()
            result[str(concurrency)] = {
                **loop.to_json(),
                "http_us_per_token": round((http_after_s - http_s) * 1e6 / loop.tokens, 1),
                "engine_us_per_token": round((engine_after_s - engine_s) * 1e6 / loop.tokens, 1),
            }
            context.log(f"  {concurrency}: {result[str(concurrency)]}")
    return {"http": result}
