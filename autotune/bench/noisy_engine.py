"""An engine of figures alone, for months of ticks in minutes: a day's curve, noise; tunables by the engine's rules."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from typing import Final

from engine.clock import Clock
from engine.control_client import EngineUnreachable, PatchAnswer, TunablesView
from engine.stats import EngineStats, Gauges, ResidentBytes
from engine.tunable_state import Patch, TunableState
from engine.tunables import TunableValue, default_values

_POOL_BYTES: Final = 256 << 20
_TOKEN_BYTES: Final = {"native": 1024, "int8": 560, "k8v4": 432, "int4": 304}
_DAY_S: Final = 86_400.0
_MEAN_RPS: Final = 2.0
_MOST_NEW: Final = 400  # requests between two readings


class NoisyEngine:
    """Implements the daemon's Control protocol in process. ``is_away``: nobody answers. :meth:`restart`: another
    instance, counters at 0.
    """

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        self._clock, self._rng = clock, rng
        self.is_away = False
        self.instances = 0
        self.restart()

    def restart(self) -> None:
        self.instances += 1
        now_ns = self._clock.now_ns()
        self._state = TunableState(default_values(), now_ns)
        self._figures = EngineStats(
            f"instance-{self.instances}", "noisy", now_ns, 4096, 64, 0, {}, gauges=Gauges(kv_pool_bytes=_POOL_BYTES)
        )

    def stats(self) -> EngineStats:
        self._check()
        figures, now_ns = self._figures, self._clock.now_ns()
        self._serve((now_ns - figures.stamp_ns) / 1e9)
        figures.stamp_ns, figures.revision = now_ns, self._state.revision
        figures.effective = dict(self._state.effective)
        return EngineStats.from_json(json.loads(json.dumps(figures.to_json())))  # as over the wire

    def tunables(self) -> TunablesView:
        self._check()
        state = self._state
        return {
            "instance": self._figures.instance,
            "revision": state.revision,
            "desired": dict(state.desired),
            "effective": dict(state.effective),
            "writers": {
                knob: {"writer": w.writer, "reason": w.reason, "revision": w.revision, "stamp_ns": w.stamp_ns}
                for knob, w in state.writers.items()
            },
            "progress": {"resident": [], "converged_fraction": 1.0, "held_below_format_bytes": 0},
        }

    def patch(
        self, changes: Mapping[str, TunableValue], *, writer: str, reason: str = "", if_revision: int | None = None
    ) -> PatchAnswer:
        self._check()
        patch = Patch(changes, writer, reason, if_revision)
        refusal = self._state.refusal(patch)
        if refusal is not None:
            outcomes = {knob: {"status": one.status, "why": one.why} for knob, one in refusal.results.items()}
            return {"revision": refusal.revision, "results": outcomes}  # type: ignore[typeddict-item]
        self._state.commit(patch, self._clock.now_ns())
        return {
            "revision": self._state.revision,
            "results": {knob: {"status": "applied", "why": ""} for knob in changes},
        }

    def _check(self) -> None:
        if self.is_away:
            raise EngineUnreachable("the engine is away")

    def _serve(self, passed_s: float) -> None:
        """What arrived and was served since the last reading, and how full that makes the pool."""
        rng, figures = self._rng, self._figures
        day = 1.0 + 0.8 * math.sin(2 * math.pi * self._clock.now_ns() / 1e9 / _DAY_S)
        rate = _MEAN_RPS * day * rng.lognormvariate(0.0, 0.4) * (4.0 if rng.random() < 0.02 else 1.0)
        new = min(_MOST_NEW, int(rate * passed_s + rng.random()))
        running = min(64, int(rate * rng.uniform(4.0, 8.0)))
        kv_format = str(self._state.effective["kv_format"])
        tokens = int(running * rng.uniform(1500, 4500))
        used = min(_POOL_BYTES, tokens * _TOKEN_BYTES[kv_format])
        gauges, counters = figures.gauges, figures.counters
        gauges.running, gauges.waiting = running, max(0, int(rng.gauss(0, 1) + 20 * (used / _POOL_BYTES - 0.9)))
        gauges.kv_usage, gauges.kv_used_bytes, gauges.resident_tokens = used / _POOL_BYTES, used, tokens
        block_size = int(self._state.effective["block_size"])
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
