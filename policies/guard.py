"""What may reach the engine. Pure, so that training, evaluation and the daemon wrap the same guard.

Every proposal of every policy passes here, in this order: is it anything, is it allowed, has enough been seen, is the
knob the daemon's to move, is it time, can it work, does the quality budget bear it. The first objection is the verdict.
A number beyond a bound is set to the bound, and a format beyond what the budget bears to the farthest that it bears.
With a budget the guard also acts by itself: a knob that overdraws it is handed back, whatever was proposed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from engine.text import rough_time
from engine.tunables import TUNABLES, CostClass, Tunable, TunableValue
from envs.port import Change
from envs.reward import Charge
from envs.spaces import Observation
from policies.quality_budget import QualityBudget
from policies.quality_ladder import as_far_as_borne, rungs

GuardState = dict[str, Any]
"""JSON-able; journalled and restored. See :meth:`Guard.initial_state`."""


class VerdictCode(StrEnum):
    """Why a proposal may or may not go on. NOTHING and NO_CHANGE are no decisions: neither logged nor counted."""

    ALLOWED = "allowed"
    NOTHING = "nothing"  # the policy proposed nothing
    NO_CHANGE = "no_change"  # the knob is there already, or where the proposal would be clamped to
    UNKNOWN_KNOB = "unknown_knob"  # not declared, or the engine does not tell where it is
    NOT_ALLOWED = "not_allowed"  # not one of the knob's values, or outside the configured ones
    WARMING_UP = "warming_up"  # less than one full window has been seen
    OVERRIDE = "override"  # somebody else wrote the knob last
    NOT_TAKEN = "not_taken"  # asked for already and the engine does not show it: an outer limit, or advise mode
    DWELL = "dwell"  # the knob was moved too recently
    RATE_LIMIT = "rate_limit"  # too many changes of its cost class lately
    INFEASIBLE = "infeasible"  # the state cannot be reached or held
    FAILED_BEFORE = "failed_before"  # rolled back under the same load
    COOL_DOWN = "cool_down"  # its knob was rolled back too recently
    CANARY = "canary"  # a first step of its knob has not been judged yet
    OVER_BUDGET = "over_budget"  # it may lose more quality than the budget bears, or nobody knows how much
    HANDED_BACK = "handed_back"  # no verdict on the proposal: the guard's own change, for the quality budget


@dataclass(frozen=True)
class Verdict:
    """``change`` is what may be written (a number beyond a bound was clamped to it, a format to what the quality budget
    bears), or, handed back, the guard's own; None otherwise. ``is_short``: the budget does not bear the proposal as it
    stands.
    """

    code: VerdictCode
    text: str
    change: Change | None = None
    is_short: bool = False

    @property
    def allowed(self) -> bool:
        return self.code is VerdictCode.ALLOWED

    @property
    def is_decision(self) -> bool:
        """Whether it is worth logging and counting."""
        return self.code not in {VerdictCode.NOTHING, VerdictCode.NO_CHANGE}


@dataclass(frozen=True)
class Writer:
    """Who wrote a knob last, as the control API tells it. ``until_ns``: when it ends by itself, in the observer's
    clock; None for what has to be given back.
    """

    writer: str
    revision: int
    reason: str = ""
    until_ns: int | None = None


@dataclass(frozen=True)
class GuardContext:
    """What the guard may look at.

    ``writers``: by knob; one that nobody wrote since the engine started is missing. ``released``: knobs that the
    operator has given back, with the revision of the write that is thereby forgiven. ``charge``: what was generated
    since the last tick and what it loses, for the quality budget; without it nothing is earned and nothing spent.
    ``barred``: by knob or by ``knob=value``, what :mod:`policies.rollback` objects to. ``is_rollback``: the proposal
    takes back a change that missed, so it need not wait for its knob to have dwelt.
    """

    observation: Observation
    writers: Mapping[str, Writer] = field(default_factory=dict)
    released: Mapping[str, int] = field(default_factory=dict)
    charge: Charge | None = None
    barred: Mapping[str, tuple[VerdictCode, str]] = field(default_factory=dict)
    is_rollback: bool = False


Feasibility = Callable[[Change, Observation], str | None]
"""Why a change cannot work, in one line with the numbers, or None if it can."""


@dataclass(frozen=True)
class RateLimit:
    """At most ``changes`` within ``per_s`` seconds."""

    changes: int
    per_s: float


def _dwell() -> dict[CostClass, float]:
    return {CostClass.STEP: 2.0, CostClass.BACKGROUND: 5.0, CostClass.RESTART: 600.0}


def _rates() -> dict[CostClass, RateLimit]:
    return {
        CostClass.STEP: RateLimit(20, 60.0),
        CostClass.BACKGROUND: RateLimit(12, 60.0),
        CostClass.RESTART: RateLimit(1, 600.0),
    }


@dataclass(frozen=True)
class GuardConfig:
    """Limits. Raises ValueError for values that no knob has.

    ``writer``: the daemon's own name in the control API; ``nobody``: names that stand for no writer at all (values from
    the engine's start). ``window_s``: what must have been seen before the first
    action. ``allowed``: by knob, the values that may be set (a knob left out: all of them; an empty list: none).
    ``dwell_s``: by cost class, how long a knob stays before it moves again; ``knob_dwell_s`` overrides it by knob.
    ``retry_s``: how long before a change that the engine did not take is tried again.
    """

    writer: str = "autotune"
    nobody: tuple[str, ...] = ("", "startup")
    window_s: float = 10.0
    allowed: Mapping[str, tuple[TunableValue, ...]] = field(default_factory=dict)
    dwell_s: Mapping[CostClass, float] = field(default_factory=_dwell)
    knob_dwell_s: Mapping[str, float] = field(default_factory=dict)
    rates: Mapping[CostClass, RateLimit] = field(default_factory=_rates)
    retry_s: float = 60.0

    def __post_init__(self) -> None:
        for knob, values in self.allowed.items():
            if knob not in TUNABLES:
                raise ValueError(f"allowed.{knob}: unknown tunable; known: {', '.join(TUNABLES)}")
            for value in values:
                TUNABLES[knob].parse(value)
        unknown = [knob for knob in self.knob_dwell_s if knob not in TUNABLES]
        if unknown:
            raise ValueError(f"knob_dwell_s.{unknown[0]}: unknown tunable; known: {', '.join(TUNABLES)}")


class Guard:
    """Judges proposals. Reads nothing but its arguments and mutates none of them; never raises for any proposal."""

    def __init__(
        self,
        config: GuardConfig | None = None,
        feasible: Feasibility | None = None,
        quality: QualityBudget | None = None,
    ) -> None:
        self.config = config or GuardConfig()
        self.quality = quality
        self._feasible = feasible
        self._changes = {
            knob: [Change(knob, v) for v in tunable.values if v in self.config.allowed.get(knob, tunable.values)]
            for knob, tunable in TUNABLES.items()
        }

    @staticmethod
    def initial_state() -> GuardState:
        """``instance``: the engine that it is about. ``asked``: by knob, the last value let through and when.

        ``moves``: by cost class, when its last changes were let through (nanoseconds of the observer's clock).
        ``quality``: what the budget knows; see :meth:`policies.quality_budget.QualityBudget.initial_state`.
        """
        return {"instance": None, "asked": {}, "moves": {}, "quality": {}}

    def check(self, proposal: Change | None, context: GuardContext, state: GuardState) -> tuple[Verdict, GuardState]:
        """The verdict on one proposal and the next state, in which an allowed one counts as made. Once per tick: what
        the context's charge says is paid for.
        """
        state = self._current(context.observation, state)
        if self.quality is not None:
            paid = self.quality.brought_to(context.observation, context.charge, state["quality"])
            state = {**state, "quality": paid}
        # Once somebody else has written a knob, what was asked of it before says nothing about outer limits.
        taken = self.overrides(context)
        state = {**state, "asked": {knob: asked for knob, asked in state["asked"].items() if knob not in taken}}
        verdict = self._handed_back(context, state)
        if verdict is None:
            if proposal is None:
                return Verdict(VerdictCode.NOTHING, "nothing proposed"), state
            verdict = self._judge(proposal, context, state)
        state = self._remembered(verdict, proposal, context.observation, state)
        if verdict.change is None:
            return verdict, state
        now_ns, change = context.observation.stamp_ns, verdict.change
        kind = TUNABLES[change.knob].cost_class
        moves = {**state["moves"], kind.value: [*self._recent(kind, now_ns, state), now_ns]}
        asked = {**state["asked"], change.knob: [change.value, now_ns]}
        return verdict, {**state, "asked": asked, "moves": moves}

    def held(self, context: GuardContext, state: GuardState) -> dict[str, Verdict]:
        """The knobs that no proposal could move now, each with why: for masks, for policies and for people."""
        state = self._current(context.observation, state)
        result = {}
        for knob, tunable in TUNABLES.items():
            if knob not in context.observation.tunables:
                text = f"{knob}: the engine does not say where it is"
                objection: Verdict | None = Verdict(VerdictCode.UNKNOWN_KNOB, text)
            else:
                objection = self._untimely(tunable, context, state)
            if objection is not None:
                result[knob] = objection
        return result

    def possible(self, context: GuardContext, state: GuardState) -> list[Change]:
        """Every declared change that :meth:`check` would let through now as it stands: the mask of policies that take
        one.
        """
        state, in_force = self._current(context.observation, state), context.observation.tunables
        taken = self.overrides(context)
        asked = {knob: asked for knob, asked in state["asked"].items() if knob not in taken}
        state, found = {**state, "asked": asked}, []
        for knob, changes in self._changes.items():
            if knob not in in_force or self._untimely(TUNABLES[knob], context, state) is not None:
                continue
            for change in changes:
                if in_force[knob] == change.value or str(change) in context.barred:
                    continue
                if knob in asked and self._not_taken(change, {change.value}, context, state):
                    continue
                if self._cannot(change, context, state) is None:
                    found.append(change)
        return found

    def overrides(self, context: GuardContext) -> dict[str, Writer]:
        """The knobs that somebody else has taken over, with who did."""
        return {
            knob: writer
            for knob, writer in context.writers.items()
            if writer.writer not in {self.config.writer, *self.config.nobody}
            and writer.revision > context.released.get(knob, -1)
        }

    @staticmethod
    def forget(change: Change, state: GuardState) -> GuardState:
        """For a change that was let through and never got there (conflict, engine out of reach): it may be tried again
        at once. The rate limit still counts it.
        """
        return {**state, "asked": {knob: asked for knob, asked in state["asked"].items() if knob != change.knob}}

    def _current(self, observation: Observation, state: GuardState) -> GuardState:
        """The state as far as it still applies: nothing was asked of an engine that has restarted since.

        Times of the future come from a state that was saved before the machine restarted: they are forgotten.
        """
        if not _is_usable(state):
            state = self.initial_state()
        instance, now_ns = observation.instance, observation.stamp_ns
        asked = {} if instance != state["instance"] and instance is not None else state["asked"]
        return {
            "instance": instance or state["instance"],
            "asked": {knob: [value, at_ns] for knob, (value, at_ns) in asked.items() if at_ns <= now_ns},
            "moves": {kind: [at_ns for at_ns in stamps if at_ns <= now_ns] for kind, stamps in state["moves"].items()},
            "quality": state.get("quality", {}),
        }

    def _judge(self, proposal: Change, context: GuardContext, state: GuardState) -> Verdict:
        tunable, in_force = TUNABLES.get(proposal.knob), context.observation.tunables
        if tunable is None:
            known = ", ".join(TUNABLES)
            return Verdict(VerdictCode.UNKNOWN_KNOB, f"no tunable {proposal.knob!r:.60}; known: {known}")
        if proposal.knob not in in_force:
            return Verdict(VerdictCode.UNKNOWN_KNOB, f"{proposal.knob}: the engine does not say where it is")
        allowed = [v for v in tunable.values if v in self.config.allowed.get(proposal.knob, tunable.values)]
        value = _clamped(proposal.value, allowed)
        if value is None:
            choices = ", ".join(map(str, allowed)) or "none"
            return Verdict(VerdictCode.NOT_ALLOWED, f"{proposal.knob}: {proposal.value!r:.60} is not among {choices}")
        wanted, now = Change(proposal.knob, value), in_force[proposal.knob]
        if now == value:
            return Verdict(VerdictCode.NO_CHANGE, f"{wanted.knob} is {value} already")
        note = "" if value == proposal.value else f", the bound, in place of {proposal.value!r:.60}"
        change, why = self._borne(wanted, allowed, context, state)
        if change.value == now:
            text = f"{wanted.knob} is {now} already, and {value} is more than the quality budget bears: {why}"
            return Verdict(VerdictCode.NO_CHANGE, text, is_short=True)
        way: Collection[TunableValue] = (value,)
        if why:
            # What of it the budget bears may change from tick to tick while an engine takes none.
            way, note = rungs(wanted, now), f", as far as the quality budget bears, in place of {value}: {why}"
        verdict = self._objection(tunable, change, way, context, state)
        if verdict is None:
            verdict = Verdict(VerdictCode.ALLOWED, f"{change.knob} {now} -> {change.value}{note}", change)
        return replace(verdict, is_short=verdict.is_short or bool(why))

    def _borne(
        self, wanted: Change, allowed: list[TunableValue], context: GuardContext, state: GuardState
    ) -> tuple[Change, str]:
        """What of a change the quality budget bears, and why not all of it."""
        if self.quality is None:
            return wanted, ""
        return as_far_as_borne(self.quality, wanted, allowed, context.observation, state["quality"])

    def _objection(
        self, tunable: Tunable, change: Change, way: Collection[TunableValue], context: GuardContext, state: GuardState
    ) -> Verdict | None:
        """To a change that would be one, to an allowed value. ``way``: see :meth:`_not_taken`."""
        objection = self._untimely(tunable, context, state) or self._not_taken(change, way, context, state)
        if objection is not None:
            return objection
        if str(change) in context.barred:
            return Verdict(*context.barred[str(change)])
        return self._cannot(change, context, state)

    def _cannot(self, change: Change, context: GuardContext, state: GuardState) -> Verdict | None:
        """Objections to where a change leads."""
        why_not = self._feasible(change, context.observation) if self._feasible else None
        if why_not is not None:
            return Verdict(VerdictCode.INFEASIBLE, f"{change}: {why_not}")
        if self.quality is not None:
            why_not = self.quality.objection(change, context.observation, state["quality"])
        return None if why_not is None else Verdict(VerdictCode.OVER_BUDGET, f"{change}: {why_not}", is_short=True)

    def _handed_back(self, context: GuardContext, state: GuardState) -> Verdict | None:
        """The guard's own change where the quality budget is being overdrawn. Neither dwell nor rates hold it up, nor
        feasibility: what then does not fit waits.
        """
        observation = context.observation
        is_warm = observation.instance is not None and observation.observed_s >= self.config.window_s
        if self.quality is None or not is_warm:
            return None
        away = {*self.overrides(context), *observation.held}
        movable = {
            knob: [change.value for change in changes] for knob, changes in self._changes.items() if knob not in away
        }
        for change, why in self.quality.hand_back(observation, movable, state["quality"]):
            if self._not_taken(change, {change.value}, context, state) is None:
                return Verdict(VerdictCode.HANDED_BACK, why, change)
        return None

    def _remembered(
        self, verdict: Verdict, proposal: Change | None, observation: Observation, state: GuardState
    ) -> GuardState:
        """The state in which the budget knows what it took back and what is asked for since."""
        if self.quality is None:
            return state
        quality, code = state["quality"], verdict.code
        if code is VerdictCode.HANDED_BACK and verdict.change is not None:
            quality = self.quality.asked_for(verdict.change.knob, observation, quality, handed_back=True)
        elif verdict.is_short and proposal is not None:
            quality = self.quality.asked_for(proposal.knob, observation, quality, handed_back=False)
        return {**state, "quality": quality}

    def _untimely(self, tunable: Tunable, context: GuardContext, state: GuardState) -> Verdict | None:
        """Objections that do not depend on the value."""
        knob, observation, config = tunable.name, context.observation, self.config
        if observation.instance is None or observation.observed_s < config.window_s:
            seen = f"{observation.observed_s:.1f} s of {config.window_s:g} s seen"
            return Verdict(VerdictCode.WARMING_UP, f"{knob}: no action before one full window, {seen}")
        writer = self.overrides(context).get(knob)
        if writer is not None:
            because = f" ({writer.reason})" if writer.reason else ""
            left = "until released"
            if writer.until_ns is not None:
                left = f"for another {rough_time(max(0, writer.until_ns - observation.stamp_ns) / 1e9)}, or {left}"
            text = f"{knob}: set by {writer.writer}{because} at revision {writer.revision}; left alone {left}"
            return Verdict(VerdictCode.OVERRIDE, text)
        if knob in context.barred and not context.is_rollback:
            return Verdict(*context.barred[knob])
        now_ns, kind = observation.stamp_ns, tunable.cost_class
        asked = state["asked"].get(knob)
        dwell_s = config.knob_dwell_s.get(knob, config.dwell_s.get(kind, 0.0))
        if asked is not None and now_ns - asked[1] < round(dwell_s * 1e9) and not context.is_rollback:
            age_s = (now_ns - asked[1]) / 1e9
            return Verdict(VerdictCode.DWELL, f"{knob}: moved {age_s:.1f} s ago, stays for {dwell_s:g} s")
        limit = config.rates.get(kind)
        if limit is not None and len(self._recent(kind, now_ns, state)) >= limit.changes:
            text = f"{knob}: {limit.changes} {kind.value} changes within {limit.per_s:g} s are the limit"
            return Verdict(VerdictCode.RATE_LIMIT, text)
        return None

    def _not_taken(
        self, change: Change, way: Collection[TunableValue], context: GuardContext, state: GuardState
    ) -> Verdict | None:
        """Asking again and again for what an outer limit keeps from happening is no change, however often asked. It is
        the same to ask for another value on the ``way`` of a proposal that the budget does not bear.
        """
        asked = state["asked"].get(change.knob)
        if asked is None or asked[0] not in way:
            return None
        age_s = (context.observation.stamp_ns - asked[1]) / 1e9
        if age_s >= self.config.retry_s:
            return None
        now = context.observation.tunables[change.knob]
        text = (
            f"{change.knob}={asked[0]} was asked for {age_s:.1f} s ago and is still {now}; "
            f"tried again after {self.config.retry_s:g} s"
        )
        return Verdict(VerdictCode.NOT_TAKEN, text)

    def _recent(self, kind: CostClass, now_ns: int, state: GuardState) -> list[int]:
        limit = self.config.rates.get(kind)
        horizon_ns = round(limit.per_s * 1e9) if limit is not None else 0
        return [at_ns for at_ns in state["moves"].get(kind.value, []) if now_ns - at_ns < horizon_ns]


def native_fits(limit: float = 0.95) -> Feasibility:
    """A feasibility check on memory: no return to native while what is in hand would not fit the pool natively.

    Needs no model of the engine: ``kv_demand`` is measured. Unknown demand is no objection.
    """

    def why_not(change: Change, observation: Observation) -> str | None:
        demand = observation.values.get("kv_demand")
        if change != Change("kv_format", "native") or demand is None or demand <= limit:
            return None
        return f"running and waiting requests would need {demand:.2f} of the pool natively, the limit is {limit:g}"

    return why_not


def _clamped(value: object, allowed: list[TunableValue]) -> TunableValue | None:
    """``value`` if it is allowed, the nearest bound for a number beyond the allowed ones, else None."""
    numbers = [number for number in allowed if isinstance(number, int)]
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    # Whole numbers are finite however large, and some are too large to be asked.
    if numbers and (isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))):
        value = min(max(numbers), max(min(numbers), value))
    return next((candidate for candidate in allowed if candidate == value), None)


def _is_usable(state: GuardState) -> bool:
    """Whether a restored state has this version's shape; anything else is replaced by a fresh one."""
    asked, moves = state.get("asked"), state.get("moves")
    if "instance" not in state or not isinstance(asked, dict) or not isinstance(moves, dict):
        return False
    if not isinstance(state.get("quality", {}), dict):
        return False
    return all(
        isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], int) for entry in asked.values()
    ) and all(isinstance(stamps, list) and all(isinstance(s, int) for s in stamps) for stamps in moves.values())
