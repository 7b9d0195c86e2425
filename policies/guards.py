"""Guards as they are used: one for a profile, and what becomes of a decision behind one."""

from __future__ import annotations

from typing import Any, Final

from engine.tunables import TUNABLES
from envs.profile import Profile
from policies.base import Decision
from policies.guard import Feasibility, Guard, GuardConfig, GuardState, Verdict, VerdictCode, native_fits
from policies.quality_budget import Losses, QualityBudget
from policies.quality_purse import Purse

QUALITY_BUDGET: Final = "quality-budget"
"""The scenario of changes that the guard makes by itself."""


def losses_of(profile: Profile) -> Losses:
    """What a profile knows of losses; nothing that it has no figure for."""
    quality = profile.quality
    if quality is None:
        return Losses({}, {})
    ways = {} if quality.evicted is None else {"window": quality.evicted, "heavy_hitter": quality.evicted}
    return Losses(quality.by_format, {**ways, **quality.evicted_by}, estimated=quality.estimated)


def guard_for(
    profile: Profile | None,
    quality_budget: float | None,
    config: GuardConfig | None = None,
    feasible: Feasibility | None = None,
) -> Guard:
    """The daemon's guard. It keeps a budget of mean relative loss per token where both it and a profile are given:
    without figures nobody could be held to one. Raises ValueError for a negative budget.
    """
    budget = None
    if profile is not None and quality_budget is not None:
        budget = QualityBudget(quality_budget, losses_of(profile))
    return Guard(config, feasible or native_fits(), budget)


def what_holds(guard: Guard) -> str:
    """What of a quality budget a guard keeps, in one line for people."""
    budget = guard.quality
    if budget is None:
        return "no quality budget is kept: without a profile (policy.profile) nobody knows what settings lose"
    kept = f"a mean loss per token of at most {budget.budget:.2%} is kept, whoever decides"
    losses, unknown = budget.losses, []
    for knob, figure in (("kv_format", losses.of_format), ("eviction", losses.of_eviction)):
        values = [str(value) for value in TUNABLES[knob].values if figure(value) is None]
        unknown += [f"{knob} {', '.join(values)}"] if values else []
    kept += ", by figures that are estimated" if losses.estimated else ""
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
    """The decision that a verdict makes of a policy's: the guard's own where it handed a knob back."""
    if verdict.code is not VerdictCode.HANDED_BACK:
        return decision
    return Decision(verdict.change, QUALITY_BUDGET, verdict.text)
