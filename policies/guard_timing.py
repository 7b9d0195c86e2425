"""Whose a knob is and whether it is time: the guard's objections that do not depend on where a change leads."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from engine.text import rough_time
from engine.tunables import CostClass, Tunable, TunableValue
from envs.port import Change
from policies.guard_config import GuardConfig
from policies.verdict import GuardContext, GuardState, Verdict, VerdictCode, Writer


@dataclass(frozen=True)
class Timing:
    """By the limits of one configuration."""

    config: GuardConfig

    def overrides(self, context: GuardContext) -> dict[str, Writer]:
        """The knobs that somebody else has taken over, with who did."""
        return {
            knob: writer
            for knob, writer in context.writers.items()
            if writer.writer not in {self.config.writer, *self.config.nobody}
            and writer.revision > context.released.get(knob, -1)
        }

    def is_warm(self, context: GuardContext) -> bool:
        """Whether one full window of the engine has been seen."""
        observation = context.observation
        return observation.instance is not None and observation.observed_s >= self.config.window_s

    def objection(self, tunable: Tunable, context: GuardContext, state: GuardState) -> Verdict | None:
        """To any change of a knob now."""
        knob, observation, config = tunable.name, context.observation, self.config
        if not self.is_warm(context):
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
        if limit is not None and len(self.recent(kind, now_ns, state)) >= limit.changes:
            text = f"{knob}: {limit.changes} {kind.value} changes within {limit.per_s:g} s are the limit"
            return Verdict(VerdictCode.RATE_LIMIT, text)
        return None

    def not_taken(
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

    def recent(self, kind: CostClass, now_ns: int, state: GuardState) -> list[int]:
        """When changes of a cost class were let through, as far back as its rate looks."""
        limit = self.config.rates.get(kind)
        horizon_ns = round(limit.per_s * 1e9) if limit is not None else 0
        return [at_ns for at_ns in state["moves"].get(kind.value, []) if now_ns - at_ns < horizon_ns]
