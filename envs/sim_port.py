"""A simulated engine behind the door that environments know: readings with a lag, changes with a delay."""

from __future__ import annotations

from engine.stats import EngineStats
from engine.tunable_state import Patch
from envs.port import ApplyResult, ApplyStatus, Change
from envs.simulator import Simulator

WRITER = "autotune"


class SimPort:
    """:class:`envs.port.EnginePort` over a simulator. ``advance`` lets time pass; ``read`` gives the reading made then,
    ``metric_lag_s`` before its end.
    """

    def __init__(self, simulator: Simulator, *, metric_lag_s: float = 0.0) -> None:
        if metric_lag_s < 0:
            raise ValueError(f"a lag must be >= 0 s, got {metric_lag_s}")
        self.simulator = simulator
        self._lag_ns = round(1e9 * metric_lag_s)
        self._reading = simulator.stats()

    def advance(self, until_ns: int) -> None:
        """Run to the first step boundary at or after a moment."""
        self.simulator.run_until(until_ns - self._lag_ns)
        self._reading = self.simulator.stats()
        self.simulator.run_until(until_ns)

    def read(self) -> EngineStats:
        return self._reading

    def apply(self, change: Change) -> ApplyResult:
        outcome = self.simulator.apply(Patch({change.knob: change.value}, WRITER))
        if outcome is None:
            delay_s = self.simulator.options.actuation_delay_s
            return ApplyResult(ApplyStatus.CONVERGING, f"takes effect after {delay_s:g} s", change)
        result = outcome.results[change.knob]
        status = ApplyStatus(result.status)
        took = status in {ApplyStatus.APPLIED, ApplyStatus.CONVERGING}
        return ApplyResult(status, result.why, change if took else None, outcome.revision)
