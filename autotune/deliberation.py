"""One tick's thinking: policy, then guard. A function of what is recorded, so that the journal can be decided again.

The loop and ``autotune replay-decisions`` both come through here: there is no second path that could drift.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from envs.spaces import Observation
from policies.base import Decision, Policy, PolicyState
from policies.guard import Guard, GuardContext, GuardState, Verdict, Writer


@dataclass(frozen=True)
class Thought:
    """What came of a tick, and the states to go on with when what was allowed has been written.

    ``error``: what the policy raised; the decision is then to do nothing, and its state is a fresh one.
    """

    decision: Decision
    verdict: Verdict
    policy_state: PolicyState
    guard_state: GuardState
    error: Exception | None = None

    def to_json(self) -> dict[str, Any]:
        """What the journal keeps and a replay must find again, states as a fingerprint."""
        change = self.decision.change
        return {
            "scenario": self.decision.scenario,
            "reason": self.decision.reason,
            "proposal": None if change is None else [change.knob, change.value],
            "verdict": [str(self.verdict.code), self.verdict.text],
            "after": fingerprint([self.policy_state, self.guard_state]),
        }


def think(
    policy: Policy,
    guard: Guard,
    observation: Observation,
    writers: Mapping[str, Writer],
    policy_state: PolicyState,
    guard_state: GuardState,
) -> Thought:
    """Decide one tick. Never raises for what a policy does; mutates nothing."""
    error: Exception | None = None
    try:
        decision, next_state = policy.decide(observation, policy_state)
    except Exception as raised:  # noqa: BLE001  # whatever it is, the answer is to leave the engine alone
        error, next_state = raised, policy.initial_state()
        decision = Decision(None, "policy_error", f"policy {policy.name} failed: {raised!r}")
    verdict, next_guard = guard.check(decision.change, GuardContext(observation, writers), guard_state)
    return Thought(decision, verdict, next_state, next_guard, error)


def fingerprint(state: object) -> str:
    """Equal for equal JSON values, whatever the order of keys; floats count bit for bit."""
    text = json.dumps(state, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
