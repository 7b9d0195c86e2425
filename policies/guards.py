"""Guards as they are used: one for a profile, and what becomes of a decision behind one."""

from __future__ import annotations

from typing import Any, Final

from engine.tunables import TUNABLES
from envs.profile import Profile
from envs.reward import literature_quality
from policies.base import Decision
from policies.guard import Feasibility, Guard, GuardConfig, GuardState, Verdict, VerdictCode, native_fits
from policies.quality_budget import Losses, QualityBudget
from policies.quality_purse import Purse

QUALITY_BUDGET: Final = "quality-budget"
"""The scenario of changes that the guard makes by itself."""


def losses_of(profile: Profile | None) -> Losses:
    """What a profile knows of losses, nothing that it has no figure for; published figures where nothing was measured
    or there is no profile.
    """
    quality = None if profile is None else profile.quality
    if quality is None:
        usual = literature_quality()
        return Losses(usual.by_format, usual.evicted_by, estimated=True)
    ways = {} if quality.evicted is None else {"window": quality.evicted, "heavy_hitter": quality.evicted}
    return Losses(quality.by_format, {**ways, **quality.evicted_by}, estimated=quality.estimated)


def guard_for(
    profile: Profile | None,
    quality_budget: float | None,
    config: GuardConfig | None = None,
    feasible: Feasibility | None = None,
) -> Guard:
    """The daemon's guard. It keeps ``quality_budget``, a mean relative loss per token, unless that is None. Raises
    ValueError for a negative one.
    """
    budget = None if quality_budget is None else QualityBudget(quality_budget, losses_of(profile))
    return Guard(config, feasible or native_fits(), budget)


def what_holds(guard: Guard) -> str:
    """What of a quality budget a guard keeps, in one line for people."""
    budget = guard.quality
    if budget is None:
        return "no quality budget is kept (policy.quality_budget is null)"
    kept = f"a mean loss per token of at most {budget.budget:.2%} is kept, whoever decides"
    losses, unknown = budget.losses, []
    for knob, figure in (("kv_format", losses.of_format), ("eviction", losses.of_eviction)):
        values = [str(value) for value in TUNABLES[knob].values if figure(value) is None]
        unknown += [f"{knob} {', '.join(values)}"] if values else []
    kept += ", by figures that are estimated, published ones of other models" if losses.estimated else ""
    return f"{kept}; refused for want of figures: {'; '.join(unknown)}" if unknown else kept


def quality_status(guard: Guard, state: GuardState) -> dict[str, Any]:
    """What holds and how it stands, JSON-able: ``lost_per_token`` is the mean of late (it fades over an hour), None
    before any token.
    """
    quality = state.get("quality", {})
    purse = Purse.of(quality.get("purse"))
    return {
        "holds": what_holds(guard),
        "budget": None if guard.quality is None else guard.quality.budget,
        "lost_per_token": purse.loss / purse.tokens if purse.tokens else None,
        "handed_back": sorted(quality.get("spent", ())),
    }


def made(decision: Decision, verdict: Verdict) -> Decision:
    """The decision that a verdict makes of a policy's: the guard's own where it handed a knob back, and the part of the
    way that the quality budget bears.
    """
    if verdict.code is VerdictCode.HANDED_BACK:
        return Decision(verdict.change, QUALITY_BUDGET, verdict.text)
    if verdict.is_short and verdict.change is not None:
        return Decision(verdict.change, decision.scenario, f"{decision.reason}; the guard: {verdict.text}")
    return decision
