"""A policy that another one stands behind, under that one's name and with its state."""

from __future__ import annotations

from envs.spaces import Observation
from policies.base import Decision, Policy, PolicyState


class Delegating:
    """Decides what ``policy`` decides; subclasses add what is to be told of it."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    @property
    def name(self) -> str:
        return self.policy.name

    def initial_state(self) -> PolicyState:
        return self.policy.initial_state()

    def decide(self, observation: Observation, state: PolicyState) -> tuple[Decision, PolicyState]:
        return self.policy.decide(observation, state)
