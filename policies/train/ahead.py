"""What an action would be worth, by what the simulator foresees after it."""

from __future__ import annotations

from engine.tunables import TUNABLES
from envs.reward import Objective, RewardWeights
from envs.simulated import Foreseen
from envs.spaces import decode_action
from policies.evaluation.calibration import TBT_FACTOR, TTFT_FACTOR
from policies.train.recipe import Lookahead, Recipe
from policies.train.traffic import Episode


def horizon_s(episode: Episode, plan: Lookahead, interval_s: float) -> float:
    """For how long an action of this episode is left alone: see the plan."""
    targets, outputs = episode.targets, episode.mean_tps / episode.mean_rps
    one_s = targets.ttft_s / TTFT_FACTOR + outputs * targets.tbt_s / TBT_FACTOR
    return min(plan.longest * interval_s, max(plan.least * interval_s, plan.requests * one_s))


def worth(
    action: int,
    ahead: Foreseen,
    episode: Episode,
    weights: RewardWeights,
    price: float,
    recipe: Recipe,
    left_s: float,
) -> float:
    """In shares of what the mean rate brings in ``left_s``, for which the action was left alone: the service's reward,
    less the price of quality and of the change.
    """
    figures, change = ahead.figures, decode_action(action)
    if weights.objective is Objective.INTERACTIVE:
        late = figures.violations + ahead.waiting  # who still waits then will hardly be in time
        service = (weights.goodput * figures.good - weights.violation * late) / episode.mean_rps
    else:
        service = weights.throughput * figures.tokens - weights.violation * (figures.rejected + figures.failed)
        service /= episode.mean_rps
    quality = price * figures.quality_charge / episode.mean_tps / recipe.quality_budget
    cost = 0.0 if change is None else weights.switching[TUNABLES[change.knob].cost_class]
    return (service - quality - cost * recipe.interval_s / episode.mean_rps) / left_s
