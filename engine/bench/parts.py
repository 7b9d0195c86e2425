"""Where a step's time goes, by part. Parts are methods of a running engine, wrapped from outside."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from engine.core import EngineCore
from engine.model_runner import ModelRunner

REST = "rest"


class PartTimes:
    """Time per part, each without the parts called inside it."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self._stack: list[str] = []
        self._since_ns = 0
        self._spent_ns: dict[str, int] = defaultdict(int)

    def reset(self) -> None:
        self._spent_ns.clear()

    def spent_us(self, steps: int) -> dict[str, float]:
        """Microseconds per step, largest first."""
        ordered = sorted(self._spent_ns.items(), key=lambda item: -item[1])
        return {name: round(spent / 1e3 / steps, 1) for name, spent in ordered}

    def wrap(self, owner: Any, method: str, part: str) -> None:
        """Count the time of ``owner.method`` for ``part``."""
        function = getattr(owner, method)

        def timed(*arguments: Any, **options: Any) -> Any:
            self._enter(part)
            try:
                return function(*arguments, **options)
            finally:
                self._leave()

        setattr(owner, method, timed)

    def _enter(self, part: str) -> None:
        self._charge()
        self._stack.append(part)

    def _leave(self) -> None:
        self._charge()
        self._stack.pop()

    def _charge(self) -> None:
        now_ns = self._now_ns()
        if self._stack:
            self._spent_ns[self._stack[-1]] += now_ns - self._since_ns
        self._since_ns = now_ns


class TimedOps:
    """The kernels, with the time of attention and of writing KV counted. Has whatever ``ops`` has."""

    def __init__(self, ops: Any, parts: PartTimes) -> None:
        for name in ("write_kv", "plan_decode", "decode_attention", "attention_mass", "prefill_attention", "recode"):
            setattr(self, name, getattr(ops, name))
            parts.wrap(self, name, "recode" if name == "recode" else "attention")


def watch(core: EngineCore, runner: ModelRunner, parts: PartTimes) -> None:
    """Wrap an engine's parts; what none of them counts is ``rest``."""
    parts.wrap(core, "step", REST)
    parts.wrap(core._scheduler, "schedule", "schedule")
    parts.wrap(core._scheduler, "update", "results")
    parts.wrap(core._live, "deltas", "emit")
    parts.wrap(runner._builder, "build", "tables")
    parts.wrap(runner._sampler, "sample", "sampling")
    parts.wrap(runner.loaded.model, "hidden", "model")
    parts.wrap(runner.loaded.model, "logits", "model")
    if hasattr(runner.loaded.model, "decode"):
        parts.wrap(runner.loaded.model, "decode", "model")
