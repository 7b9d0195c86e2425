"""Rules that decide in place of a policy that could not be used when the daemon started; and why it could not."""

from __future__ import annotations

from envs.spaces import Observation
from policies.base import Decision, Policy, PolicyState


class StandIn:
    """``policy``, under its own name and with its own state; ``why`` the wanted one was refused, in one line."""

    def __init__(self, policy: Policy, why: str) -> None:
        self.policy, self.why = policy, why

    @property
    def name(self) -> str:
        return self.policy.name

    def initial_state(self) -> PolicyState:
        return self.policy.initial_state()

    def decide(self, observation: Observation, state: PolicyState) -> tuple[Decision, PolicyState]:
        return self.policy.decide(observation, state)


def refusal_of(policy: Policy) -> str:
    """Why the policy that was asked for is not the one that decides; empty where it is."""
    return policy.why if isinstance(policy, StandIn) else ""
