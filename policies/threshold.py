"""Threshold rules as a policy: each rule is a latch with a delay on both sides, and the active ones overlay each other.

A rule becomes active when its condition has held for its time, and stays so until its release condition has held for
its own: hysteresis by construction. What active rules ask for, the more important first, over the file's
``otherwise`` values, is where the knobs should be; the first one that is elsewhere is moved, one per tick.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from engine.tunables import TunableValue
from envs.spaces import Observation
from policies.base import Change, Decision, PolicyState
from policies.expressions import show
from policies.rules import Rule, RuleSet

STEADY: Final = "steady"
OTHERWISE: Final = "otherwise"

# A longer silence between two ticks says nothing about whether a condition held all the while.
_LONGEST_GAP_NS: Final = 60 * 10**9
_Wish = tuple[str, TunableValue, Rule | None]


class ThresholdPolicy:
    """A :class:`policies.base.Policy` out of a :class:`policies.rules.RuleSet`.

    State: ``stamp_ns`` of the last observation, per rule ``active`` and ``held_ns`` (for how long the condition that it
    waits for has held, None if it does not), per knob the last ``value`` seen, ``moved_ns`` (since it moved, None if it
    never did) and ``asker`` (the rule that asked last), and the knob and value ``proposed`` last.
    """

    def __init__(self, rules: RuleSet) -> None:
        self.rules = rules

    @property
    def name(self) -> str:
        return f"rules:{self.rules.name}"

    def initial_state(self) -> PolicyState:
        return {"stamp_ns": None, "rules": {}, "knobs": {}, "proposed": None}

    def decide(self, observation: Observation, state: PolicyState) -> tuple[Decision, PolicyState]:
        old = state if _is_usable(state) else self.initial_state()
        passed_ns = None if old["stamp_ns"] is None else observation.stamp_ns - old["stamp_ns"]
        if passed_ns is not None and not 0 <= passed_ns <= _LONGEST_GAP_NS:
            passed_ns = None
        if observation.instance is None:
            silent = {name: {**latch, "held_ns": None} for name, latch in old["rules"].items()}
            nothing = Decision(None, STEADY, "the engine cannot be reached; nothing is known")
            return nothing, {**old, "stamp_ns": observation.stamp_ns, "rules": silent}

        latches = {rule.name: self._latch(rule, observation, old["rules"], passed_ns) for rule in self.rules.rules}
        knobs = self._knobs(observation, old["knobs"], passed_ns)
        wishes = self._wishes(latches)
        pending = [wish for wish in wishes if self._may_move(wish, observation, knobs)]
        # What was proposed last tick and did not happen gives way to the next wish, so that one refused knob (a dwell,
        # an operator's) does not keep the others from moving.
        names = [[knob, value] for knob, value, _ in pending]
        start = names.index(old["proposed"]) + 1 if old["proposed"] in names else 0
        chosen = pending[start % len(pending)] if pending else None
        decision = self._decision(chosen, observation, latches, knobs)
        # After the decision, which may need to say which rule asked before.
        for knob, _, rule in wishes:
            if rule is not None and knob in knobs:
                knobs[knob] = {**knobs[knob], "asker": rule.name}
        return decision, {
            "stamp_ns": observation.stamp_ns,
            "rules": latches,
            "knobs": knobs,
            "proposed": list(chosen[:2]) if chosen else None,
        }

    @staticmethod
    def _latch(
        rule: Rule, observation: Observation, latches: Mapping[str, Any], passed_ns: int | None
    ) -> dict[str, Any]:
        old = latches.get(rule.name, {})
        active, held_ns = old.get("active") is True, old.get("held_ns")
        if active and rule.release is None:
            awaited = not rule.when.holds(observation)
        elif active and rule.release is not None:
            awaited = rule.release.holds(observation)
        else:
            awaited = rule.when.holds(observation)
        if not awaited:
            return {"active": active, "held_ns": None}
        held_ns = 0 if held_ns is None or passed_ns is None else held_ns + passed_ns
        if held_ns >= round((rule.release_for_s if active else rule.for_s) * 1e9):
            return {"active": not active, "held_ns": None}
        return {"active": active, "held_ns": held_ns}

    @staticmethod
    def _knobs(observation: Observation, old: Mapping[str, Any], passed_ns: int | None) -> dict[str, Any]:
        knobs: dict[str, Any] = {}
        for knob, value in observation.tunables.items():
            last = old.get(knob)
            if last is None:
                knobs[knob] = {"value": value, "moved_ns": None, "asker": None}
            elif last["value"] != value:
                knobs[knob] = {"value": value, "moved_ns": 0, "asker": last["asker"]}
            else:
                moved_ns = None if last["moved_ns"] is None else last["moved_ns"] + (passed_ns or 0)
                knobs[knob] = {**last, "moved_ns": moved_ns}
        return knobs

    def _wishes(self, latches: Mapping[str, Any]) -> list[_Wish]:
        """Where each knob should be and who asks for it, most important first."""
        wishes: dict[str, _Wish] = {}
        for rule in self.rules.rules:
            if latches[rule.name]["active"]:
                for knob, value in rule.sets:
                    wishes.setdefault(knob, (knob, value, rule))
        for knob, value in self.rules.otherwise:
            wishes.setdefault(knob, (knob, value, None))
        return list(wishes.values())

    def _may_move(self, wish: _Wish, observation: Observation, knobs: Mapping[str, Any]) -> bool:
        knob, value, _ = wish
        if knob not in knobs or knob in observation.held or observation.tunables[knob] == value:
            return False
        moved_ns = knobs[knob]["moved_ns"]
        return moved_ns is None or moved_ns >= round(self.rules.dwell_s * 1e9)

    def _decision(
        self, wish: _Wish | None, observation: Observation, latches: Mapping[str, Any], knobs: Mapping[str, Any]
    ) -> Decision:
        if wish is None:
            active = [name for name, latch in latches.items() if latch["active"]]
            return Decision(None, STEADY, f"nothing to change; active rules: {', '.join(active) or 'none'}")
        knob, value, rule = wish
        step = f"{knob} {observation.tunables[knob]} -> {value}"
        if rule is not None:
            seen = rule.when.seen(observation)
            if not rule.when.holds(observation):
                seen = _staying(rule, observation, latches[rule.name]["held_ns"])
            return Decision(Change(knob, value), rule.name, f"{rule.because}: {seen}; {step}")
        asker = next((r for r in self.rules.rules if r.name == knobs[knob]["asker"]), None)
        if asker is None:
            return Decision(Change(knob, value), OTHERWISE, f"no rule asks for anything else; {step}")
        seen = (asker.release or asker.when).seen(observation)
        return Decision(Change(knob, value), asker.name, f"{asker.name} is over: {seen}; {step}")


def _staying(rule: Rule, observation: Observation, held_ns: int | None) -> str:
    """Why a rule is in force whose condition does not hold any more: the figures, what would end it, and for how long
    that has held so far (``held_ns``, None if it does not hold).
    """
    names = dict.fromkeys((*rule.when.names, *(rule.release.names if rule.release is not None else ())))
    seen = ", ".join(f"{name} {show(name, observation)}" for name in names)
    if rule.release is not None and not rule.release_for_s:
        return f"{seen} (in force until {rule.release.text})"
    end = f"{rule.when.text} has not held" if rule.release is None else f"{rule.release.text} has held"
    so_far = "" if held_ns is None else f", {held_ns / 1e9:.3g} s so far"
    return f"{seen} (in force until {end} for {rule.release_for_s:g} s{so_far})"


def _is_usable(state: PolicyState) -> bool:
    """Whether a restored state has this version's shape; anything else is replaced by a fresh one."""
    stamp_ns, rules, knobs = state.get("stamp_ns"), state.get("rules"), state.get("knobs")
    if not (stamp_ns is None or isinstance(stamp_ns, int)) or "proposed" not in state:
        return False
    if not isinstance(rules, dict) or not isinstance(knobs, dict):
        return False
    latches_fit = all(
        isinstance(latch, dict) and isinstance(latch.get("held_ns"), int | None) for latch in rules.values()
    )
    knobs_fit = all(
        isinstance(knob, dict) and {"value", "asker"} <= set(knob) and isinstance(knob.get("moved_ns"), int | None)
        for knob in knobs.values()
    )
    return latches_fit and knobs_fit
