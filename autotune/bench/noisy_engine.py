"""An engine of figures alone, for months of ticks in minutes: a day's curve, and noise."""

from __future__ import annotations

import math
import random
from typing import Final

from autotune.bench.figure_engine import FigureEngine
from engine.clock import Clock
from engine.stats import EngineStats, ResidentBytes

_POOL_BYTES: Final = 256 << 20
_TOKEN_BYTES: Final = {"native": 1024, "int8": 560, "k8v4": 432, "int4": 304}
_DAY_S: Final = 86_400.0
_MEAN_RPS: Final = 2.0
_MOST_NEW: Final = 400  # requests between two readings


class NoisyEngine(FigureEngine):
    """Serves at every reading what has come since the last one."""

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        super().__init__(clock, "noisy", _POOL_BYTES)
        self._rng = rng

    def stats(self) -> EngineStats:
        self.check_reachable()
        self._serve((self.clock.now_ns() - self.figures.stamp_ns) / 1e9)
        return super().stats()

    def _serve(self, passed_s: float) -> None:
        """What arrived and was served since the last reading, and how full that makes the pool."""
        rng, figures = self._rng, self.figures
        day = 1.0 + 0.8 * math.sin(2 * math.pi * self.clock.now_ns() / 1e9 / _DAY_S)
        rate = _MEAN_RPS * day * rng.lognormvariate(0.0, 0.4) * (4.0 if rng.random() < 0.02 else 1.0)
        new = min(_MOST_NEW, int(rate * passed_s + rng.random()))
        running = min(64, int(rate * rng.uniform(4.0, 8.0)))
        kv_format = str(self.state.effective["kv_format"])
        tokens = int(running * rng.uniform(1500, 4500))
        used = min(_POOL_BYTES, tokens * _TOKEN_BYTES[kv_format])
        gauges, counters = figures.gauges, figures.counters
        gauges.running, gauges.waiting = running, max(0, int(rng.gauss(0, 1) + 20 * (used / _POOL_BYTES - 0.9)))
        gauges.kv_usage, gauges.kv_used_bytes, gauges.resident_tokens = used / _POOL_BYTES, used, tokens
        block_size = int(self.state.effective["block_size"])
        gauges.resident = [ResidentBytes(kv_format, block_size, used, tokens)]
        slow = 1.0 + 4.0 * max(0.0, gauges.kv_usage - 0.8)
        for name, each in (
            ("requests_offered", 1), ("requests_admitted", 1), ("requests_completed", 1),
            ("offered_prompt_tokens", 800), ("prompt_tokens", 800), ("generation_tokens", 200),
        ):  # fmt: skip
            setattr(counters, name, getattr(counters, name) + new * each)
        if new:
            figures.ttft.observe(0.2 * slow * rng.lognormvariate(0.0, 0.5), new)
            figures.itl.observe(0.03 * slow * rng.lognormvariate(0.0, 0.3), new * 199)
            figures.prompt_lengths.observe(0.8 * rng.lognormvariate(0.0, 0.2), new)
            figures.output_lengths.observe(0.2 * rng.lognormvariate(0.0, 0.2), new)
