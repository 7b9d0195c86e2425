"""The predictor for a profile: the only place that knows what of a profile it takes."""

from __future__ import annotations

from envs.profile import Profile
from envs.reward import QualityTable, literature_quality
from envs.signals import Targets
from policies.effects import EffectModel, EngineFacts
from policies.predictor import PredictorPolicy
from policies.predictor_choice import PredictorConfig


def effect_model_of(
    profile: Profile, targets: Targets, *, quality: QualityTable | None = None, facts: EngineFacts | None = None
) -> EffectModel:
    """Effects on the profile's engine. Where the profile has measured no quality, the literature's is taken.

    Raises ValueError for a pool that is too small for the model.
    """
    found = quality or profile.quality_table() or literature_quality()
    return EffectModel(profile.groups(), profile.pool_bytes, profile.latency_model(), found, targets, facts)


def predictor_of(profile: Profile, targets: Targets, config: PredictorConfig | None = None) -> PredictorPolicy:
    """A predictor for the profile's engine. Raises ValueError for a pool that is too small for the model."""
    return PredictorPolicy(effect_model_of(profile, targets), config, name=f"predictor:{profile.model.name}")
