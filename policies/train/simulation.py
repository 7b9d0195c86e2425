"""The simulated engine that plays an episode."""

from __future__ import annotations

from envs.profile import Profile
from envs.reward import RewardWeights
from envs.simulated import SimulatedEngine
from policies.train.recipe import Recipe
from policies.train.traffic import Episode


def engine_of(episode: Episode, recipe: Recipe, profile: Profile, weights: RewardWeights) -> SimulatedEngine:
    """Not yet reset."""
    return SimulatedEngine(
        profile,
        episode.trace,
        rate_scale=episode.rate_scale,
        pool_bytes=recipe.pool_bytes,
        interval_s=recipe.interval_s,
        warm_up_s=recipe.warm_up_s,
        values=episode.values,
        randomise=recipe.randomisation(),
        targets=episode.targets,
        weights=weights,
        short_s=recipe.short_s,
        long_s=recipe.long_s,
    )
