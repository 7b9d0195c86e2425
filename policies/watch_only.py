"""The policy beside an engine whose settings are fixed while it runs: it wants nothing."""

from __future__ import annotations

from envs.spaces import Observation
from policies.base import Decision, PolicyState


class WatchOnly:
    """A :class:`policies.base.Policy`. What a restart would be good for is weighed apart, over minutes."""

    @property
    def name(self) -> str:
        return "watch-only"

    def initial_state(self) -> PolicyState:
        return {}

    def decide(self, observation: Observation, state: PolicyState) -> tuple[Decision, PolicyState]:
        del observation
        return Decision(None, "steady", "this engine takes its settings at its start only"), state
