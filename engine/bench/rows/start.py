"""From the command to the first answer, bundled model, imports included; the wall clock's seconds."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from statistics import median
from typing import Any

import engine
from engine.bench.client import Target, ask, prompts
from engine.bench.context import Context
from engine.bench.server import serving

_BUNDLED = Path(engine.__file__).parent / "bundled" / "model"


def run(context: Context) -> dict[str, Any]:
    times = []
    for _ in range(2 if context.quick else 5):
        begin_s = time.monotonic()
        with serving(_BUNDLED) as server:
            asyncio.run(ask(Target("127.0.0.1", server.port, "bench"), prompts(1, 16, 2048, 0)[0], 1))
            times.append(time.monotonic() - begin_s)
    context.log(f"  first answers after {[round(value, 2) for value in times]} s")
    # The first start may have compiled kernels.
    return {"first_answer_s": round(median(times[1:]), 3)}
