"""An exported policy at work: numpy only. Where it does not know its way, or is late, its fallback decides.

The mask is that of training: a guard like the one behind which it was trained runs along inside, so that the network is
never asked about a change that the guard would refuse. The real guard still has the last word.

A policy with an advisor (:mod:`policies.advice_input`) sees what that one would do, and falls back on it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from engine.clock import Clock
from engine.text import one_line
from envs.spaces import NOTHING, Observation, decode_action, legal_action
from policies.advice_input import with_advice
from policies.advisor import Advisors
from policies.base import Change, Decision, Policy, PolicyState
from policies.card import Card, PolicyFileError, Tensors, read_policy
from policies.guard import Guard, GuardContext, GuardState, native_fits
from policies.guarded import guarded_mask
from policies.network import Mlp, masked_argmax, probabilities
from policies.training_range import TrainingRange

__all__ = ["LearnedPolicy", "PolicyFileError", "load_learned"]

LEARNED: Final = "learned"
STEADY: Final = "steady"
OUT_OF_RANGE: Final = "out-of-range"
TOO_LATE: Final = "too-late"
DECISION_LIMIT_S: Final = 0.05
HOLD_S: Final = 30.0  # rules stay in charge for so long after the edge of the range, so as not to take turns there
_EARLY: Final = 0.9  # ticks are not exact: this share of the interval since the last decision counts as all of it


class LearnedPolicy:
    """A :class:`policies.base.Policy` out of an exported one, with ``fallback`` for what it was not trained on.

    It decides every ``interval_s`` of its training and leaves all as it is in between. ``clock``: measures a decision;
    one that took longer than ``limit_s`` is thrown away and the rules' taken instead. That is the one thing besides its
    arguments that a decision depends on: leave it out (None: no limit) to replay a journal.

    State: ``guard``, ``fallback`` (theirs), ``decided_ns`` (when the network was last asked) and ``away_until_ns``
    with ``away`` (until when rules are in charge, and why).
    """

    def __init__(
        self, card: Card, tensors: Tensors, *, fallback: Policy, clock: Clock | None = None,
        limit_s: float = DECISION_LIMIT_S,
    ) -> None:  # fmt: skip
        self.card, self.fallback = card, fallback
        self._network = Mlp(card.network, card.normaliser, tensors)
        self._range = TrainingRange(card.ranges)
        self._guard = Guard(card.guard.config(), native_fits())
        self._clock, self._limit_ns = clock, round(1e9 * limit_s)
        self._interval_ns = round(1e9 * card.interval_s * _EARLY)

    @property
    def name(self) -> str:
        return f"learned:{self.card.name}"

    def initial_state(self) -> PolicyState:
        return {
            "guard": self._guard.initial_state(),
            "fallback": self.fallback.initial_state(),
            "decided_ns": None,
            "away_until_ns": None,
            "away": "",
        }

    def decide(self, observation: Observation, state: PolicyState) -> tuple[Decision, PolicyState]:
        old = state if _is_usable(state) else self.initial_state()
        now_ns = observation.stamp_ns
        # Rules are asked at every tick, so that what they wait for has been seen when they are needed.
        rules, rules_state = self.fallback.decide(observation, old["fallback"])
        new = {**old, "fallback": rules_state}
        if observation.instance is None:
            return Decision(None, STEADY, "the engine cannot be reached; nothing is known"), new
        began_ns = self._clock.now_ns() if self._clock else 0
        vector = observation.vector()
        why_away, scenario = self._range.objection(vector), OUT_OF_RANGE
        decision = None
        if why_away is None and self._is_due(now_ns, old):
            decision = self._ask(vector, observation, old["guard"], rules.change)
            new["decided_ns"] = now_ns
            took_ns = (self._clock.now_ns() if self._clock else 0) - began_ns
            if took_ns > self._limit_ns:
                why_away = f"the decision took {took_ns / 1e6:.1f} ms, the limit is {self._limit_ns / 1e6:g} ms"
                scenario = TOO_LATE
        if why_away is not None:
            hold_ns = round(1e9 * HOLD_S) if scenario == OUT_OF_RANGE else 0
            new |= {"away_until_ns": now_ns + hold_ns, "away": f"{scenario}: {why_away}"}
        elif not _is_away(now_ns, old):
            new |= {"away_until_ns": None, "away": ""}
        if new["away"]:
            decision = _by_fallback(self.fallback.name, rules, new["away"])
        elif decision is None:
            decision = Decision(None, STEADY, f"decides every {self.card.interval_s:g} s")
        # What rules have changed counts for the guard inside as well.
        _, new["guard"] = self._guard.check(decision.change, GuardContext(observation), old["guard"])
        return decision, new

    def _is_due(self, now_ns: int, state: PolicyState) -> bool:
        passed_ns = None if state["decided_ns"] is None else now_ns - state["decided_ns"]
        return passed_ns is None or not 0 <= passed_ns < self._interval_ns

    def _ask(
        self, vector: NDArray[np.float32], observation: Observation, guard_state: GuardState, advised: Change | None
    ) -> Decision:
        mask = guarded_mask(self._guard, GuardContext(observation), guard_state)
        seen = self._range.as_trained(vector)
        values = self._network(seen if self.card.advisor is None else with_advice(seen, advised, mask))
        if self.card.algorithm == "maskable-ppo":
            action = masked_argmax(values, mask)
        else:  # without masks in training, what is masked counts as nothing, then and now
            action = legal_action(int(np.argmax(values)), mask)
        change = decode_action(action)
        if change is None:
            return Decision(None, STEADY, f"nothing to change; {self._weight(values, mask, NOTHING)}")
        step = f"{change.knob} {observation.tunables[change.knob]} -> {change.value}"
        return Decision(change, LEARNED, f"{step}: {self._weight(values, mask, action)}; {_seen(observation)}")

    def _weight(self, values: NDArray[np.float32], mask: NDArray[np.int8], action: int) -> str:
        if self.card.algorithm == "dqn":
            return f"valued {values[action]:.3g}, nothing {values[NOTHING]:.3g}"
        every = mask if self.card.algorithm == "maskable-ppo" else np.ones_like(mask)
        shares = probabilities(values, every)
        return f"probability {shares[action]:.2f}, nothing {shares[NOTHING]:.2f}"


def load_learned(
    folder: Path, *, fallback: Policy, advisor: Advisors | None = None, clock: Clock | None = None,
    profile_digest: str | None = None, limit_s: float = DECISION_LIMIT_S,
) -> LearnedPolicy:  # fmt: skip
    """The exported policy in a folder. Raises PolicyFileError, one line, for one that does not fit this program or the
    loaded profile.

    ``advisor``: makes the policy of a name, for one that has an advisor, which is its fallback then. None where there
    is none to be had, and what it raises as ValueError, is a PolicyFileError.
    """
    card, tensors = read_policy(folder, profile_digest=profile_digest)
    if card.advisor is not None:
        fallback = _advisor(folder, card.advisor, advisor)
    return LearnedPolicy(card, tensors, fallback=fallback, clock=clock, limit_s=limit_s)


def _advisor(folder: Path, name: str, make: Advisors | None) -> Policy:
    if make is None:
        raise PolicyFileError(f"{folder}: it overrules {name}, which is not to be had here")
    try:
        return make(name)
    except ValueError as error:
        raise PolicyFileError(f"{folder}: it overrules {name}: {one_line(error, 200)}") from error


def _by_fallback(name: str, rules: Decision, why: str) -> Decision:
    kind = why.partition(":")[0]
    change: Change | None = rules.change
    return Decision(change, STEADY if change is None else kind, f"{why}; {name} decides: {rules.reason}")


def _is_away(now_ns: int, state: PolicyState) -> bool:
    until_ns = state["away_until_ns"]
    # A time further ahead than the hold was written by a clock that has since gone back.
    return until_ns is not None and 0 < until_ns - now_ns <= round(1e9 * HOLD_S)


def _seen(observation: Observation) -> str:
    shown = []
    for name in ("load", "kv_demand", "waiting", "ttft_over_target"):
        value = observation.values.get(name)
        shown.append(f"{name} {'unknown' if value is None else f'{value:.3g}'}")
    return ", ".join(shown)


def _is_usable(state: Any) -> bool:
    """Whether a restored state has this version's shape; guard and fallback look after their own."""
    return (
        isinstance(state.get("guard"), dict)
        and isinstance(state.get("fallback"), dict)
        and isinstance(state.get("away"), str)
        and all(isinstance(state.get(name, ""), int | None) for name in ("decided_ns", "away_until_ns"))
    )
