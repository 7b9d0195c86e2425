"""What every policy is: a pure step from an observation and a state to a decision and the next state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from envs.port import Change
from envs.spaces import Observation

__all__ = ["Change", "Decision", "Policy", "PolicyState"]

PolicyState = dict[str, Any]
"""JSON-able: str keys; dict, list, str, int, float, bool, None inside. Journalled at every tick and restored."""


@dataclass(frozen=True)
class Decision:
    """What a policy wants and why.

    ``change``: one knob to one value, or None for leaving all as it is. ``scenario``: a short fixed name out of a
    bounded set (the rule's name), good as a metric label; "steady" when nothing is wanted. ``reason``: a sentence for
    a person, with the observed numbers.
    """

    change: Change | None
    scenario: str
    reason: str


class Policy(Protocol):
    """Decides one knob at a time.

    ``decide`` reads nothing but its arguments (no clock, no random generator of its own, no files) and mutates neither:
    the same observation and state give the same decision and state, which is what makes the journal replayable. It
    never raises for any valid :class:`envs.spaces.Observation`, unknown values included. A state that is empty,
    or was written by another version, is treated as a fresh one.
    """

    @property
    def name(self) -> str:
        """Short name for the journal and for people."""
        ...

    def initial_state(self) -> PolicyState:
        """The state before the first observation."""
        ...

    def decide(self, observation: Observation, state: PolicyState) -> tuple[Decision, PolicyState]:
        """The decision for one tick, and the state to pass in at the next one."""
        ...
