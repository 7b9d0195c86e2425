"""What may reach the engine. Pure, so that training, evaluation and the daemon wrap the same guard.

Every proposal of every policy passes here, in this order: is it anything, is it allowed, has enough been seen, is the
knob the daemon's to move, is it time, can it work, does the quality budget bear it. The first objection is the verdict.
A number beyond a bound is set to the bound, and a format beyond what the budget bears to the farthest that it bears.
With a budget the guard also acts by itself: a knob that overdraws it is handed back, whatever was proposed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from engine.tunables import TUNABLES, Tunable, TunableValue
from envs.port import Change
from envs.spaces import Observation
from policies.feasibility import Feasibility, native_fits
from policies.guard_config import GuardConfig, RateLimit, clamped
from policies.guard_timing import Timing
from policies.quality_budget import QualityBudget
from policies.quality_ladder import as_far_as_borne, rungs
from policies.verdict import GuardContext, GuardState, Verdict, VerdictCode, Writer

__all__ = [
    "Feasibility",
    "Guard",
    "GuardConfig",
    "GuardContext",
    "GuardState",
    "RateLimit",
    "Verdict",
    "VerdictCode",
    "Writer",
    "native_fits",
]


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
        self._timing = Timing(self.config)
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
        moves = {**state["moves"], kind.value: [*self._timing.recent(kind, now_ns, state), now_ns]}
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
                objection = self._timing.objection(tunable, context, state)
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
            if knob not in in_force or self._timing.objection(TUNABLES[knob], context, state) is not None:
                continue
            for change in changes:
                if in_force[knob] == change.value or str(change) in context.barred:
                    continue
                if knob in asked and self._timing.not_taken(change, {change.value}, context, state):
                    continue
                if self._cannot(change, context, state) is None:
                    found.append(change)
        return found

    def overrides(self, context: GuardContext) -> dict[str, Writer]:
        """The knobs that somebody else has taken over, with who did."""
        return self._timing.overrides(context)

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
        value = clamped(proposal.value, allowed)
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
        """To a change that would be one, to an allowed value. ``way``: see :meth:`Timing.not_taken`."""
        timing = self._timing
        objection = timing.objection(tunable, context, state) or timing.not_taken(change, way, context, state)
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
        if self.quality is None or not self._timing.is_warm(context):
            return None
        away = {*self.overrides(context), *observation.held}
        movable = {
            knob: [change.value for change in changes] for knob, changes in self._changes.items() if knob not in away
        }
        for change, why in self.quality.hand_back(observation, movable, state["quality"]):
            if self._timing.not_taken(change, {change.value}, context, state) is None:
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
