"""Which settings a simulated engine of a profile offers at all: one without a host pool has no offload, say."""

from __future__ import annotations

from collections.abc import Mapping

from engine.errors import EngineError
from engine.tunables import TunableValue
from envs.profile import Profile
from envs.simulated import SimulatedEngine
from envs.workload.trace import TraceRequest, from_requests


class Offered:
    """Whether an engine would start with these values; each knob's value is tried once."""

    def __init__(self, profile: Profile, pool_bytes: int | None = None) -> None:
        self._profile, self._pool_bytes = profile, pool_bytes
        self._known: dict[tuple[str, TunableValue], bool] = {}

    def __call__(self, values: Mapping[str, TunableValue]) -> bool:
        return all(self._one(knob, value) for knob, value in values.items())

    def _one(self, knob: str, value: TunableValue) -> bool:
        if (knob, value) not in self._known:
            try:
                trace = from_requests("one", [TraceRequest(0.0, 16, 1)])
                env = SimulatedEngine(
                    self._profile, trace, values={knob: value}, pool_bytes=self._pool_bytes, warm_up_s=0.0
                )
                env.reset(seed=0)
                self._known[knob, value] = True
            except (ValueError, EngineError):
                self._known[knob, value] = False
        return self._known[knob, value]
