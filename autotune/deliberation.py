"""One tick's thinking: effects, policy, guard. A function of what is recorded, so that it can be done again.

The loop and ``autotune replay-decisions`` both come through here: there is no second path that could drift.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from envs.port import Change
from envs.reward import Charge
from envs.spaces import Observation
from policies.base import Decision, Policy, PolicyState
from policies.canary import first_step
from policies.guard import Guard, GuardContext, GuardState, Verdict, VerdictCode, Writer
from policies.guards import made as final_decision
from policies.rollback import EffectWatch, Judgement, WatchState


@dataclass(frozen=True)
class Minds:
    """Who decides, who judges proposals, who looks after changes."""

    policy: Policy
    guard: Guard
    watch: EffectWatch

    def initial_states(self) -> States:
        return States(self.policy.initial_state(), self.guard.initial_state(), self.watch.initial_state())


@dataclass(frozen=True)
class States:
    """What they go on with at the next tick; JSON-able."""

    policy: PolicyState
    guard: GuardState
    watch: WatchState

    def to_json(self) -> dict[str, Any]:
        return {"policy_state": self.policy, "guard_state": self.guard, "watch_state": self.watch}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> States:
        """Inverse of :meth:`to_json`. Raises KeyError for anything else."""
        return cls(data["policy_state"], data["guard_state"], data["watch_state"])


@dataclass(frozen=True)
class Thought:
    """What came of a tick, and the states to go on with once what was allowed has been written.

    ``decision``: the policy's, the first step of it, or a rollback in its place. ``judged``: earlier changes that can
    be told by now. ``predicted``: what the allowed change should do, None where nobody can tell. ``error``: what the
    policy raised; its decision is then to do nothing, and its state a fresh one.
    """

    decision: Decision
    verdict: Verdict
    states: States
    judged: list[Judgement]
    predicted: dict[str, float] | None = None
    is_rollback: bool = False
    is_canary: bool = False
    error: Exception | None = None

    @property
    def final(self) -> Decision:
        """What is written and told: the guard's own decision where it handed a knob back."""
        return final_decision(self.decision, self.verdict)

    def to_json(self) -> dict[str, Any]:
        """What the journal keeps and a replay must find again, states as a fingerprint."""
        change, let_through = self.decision.change, self.verdict.change
        return {
            "scenario": self.decision.scenario,
            "reason": self.decision.reason,
            "proposal": None if change is None else [change.knob, change.value],
            "verdict": [str(self.verdict.code), self.verdict.text],
            "let_through": None if let_through is None else [let_through.knob, let_through.value],
            "judged": [[judgement.tick, str(judgement.outcome), judgement.why] for judgement in self.judged],
            "predicted": self.predicted,
            "after": fingerprint(self.states.to_json()),
        }


def think(
    minds: Minds,
    observation: Observation,
    writers: Mapping[str, Writer],
    states: States,
    charge: Charge | None = None,
) -> Thought:
    """Decide one tick. Never raises for what a policy does; mutates nothing. ``charge``: see the guard's context."""
    policy, guard, watch = minds.policy, minds.guard, minds.watch
    watched, judged = watch.look(observation, writers, states.watch, guard.config.writer)
    error: Exception | None = None
    try:
        decision, next_policy = policy.decide(observation, states.policy)
    except Exception as raised:  # noqa: BLE001  # whatever it is, the answer is to leave the engine alone
        error, next_policy = raised, policy.initial_state()
        decision = Decision(None, "policy_error", f"policy {policy.name} failed: {raised!r}")
    back = watch.wish(watched)
    step = None if back is not None else _first_step(decision, observation, watch)
    wanted = back or step or decision
    context = GuardContext(
        observation, writers, charge=charge, barred=watch.barred(watched), is_rollback=back is not None
    )
    verdict, next_guard = guard.check(wanted.change, context, states.guard)
    predicted = None if verdict.change is None else watch.predict(verdict.change, observation)
    is_own = verdict.code is not VerdictCode.HANDED_BACK  # else the guard's change, in place of what was wanted
    return Thought(
        wanted,
        verdict,
        States(next_policy, next_guard, watched),
        judged,
        predicted=None if predicted is None else predicted[0],
        is_rollback=is_own and back is not None,
        is_canary=is_own and step is not None,
        error=error,
    )


def made(minds: Minds, thought: Thought, change: Change, tick: int, observation: Observation) -> Thought:
    """The thought with its change on record as written."""
    watch = minds.watch.made(
        tick, change, observation, thought.states.watch, rollback=thought.is_rollback, canary=thought.is_canary
    )
    return replace(thought, states=replace(thought.states, watch=watch))


def _first_step(decision: Decision, observation: Observation, watch: EffectWatch) -> Decision | None:
    change = decision.change
    step = None if change is None else first_step(change, observation, watch.config.canary)
    if step is None or change is None:
        return None
    return Decision(step, decision.scenario, f"a first step, {step}, on the way to {change}: {decision.reason}")


def fingerprint(state: object) -> str:
    """Equal for equal JSON values, whatever the order of keys; floats count bit for bit."""
    text = json.dumps(state, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
