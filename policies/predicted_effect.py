"""What one change is predicted to do, in the observation's words: for the guard to hold against what comes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.tunables import TUNABLES
from envs.port import Change
from envs.spaces import Observation
from policies.effects import KNOBS, Effect, EffectModel
from policies.load import forecast_rps, load_of


@dataclass(frozen=True)
class PredictedEffect:
    """``before`` and ``after``: features by name (kv_usage, running, ttft_tail_s, tbt_tail_s, goodput_rps) with the
    knob where it is and where the change puts it, at the same load. ``quality``: relative loss per token that it adds,
    < 0 where it saves some. ``ready_s``: from when on measured values can show it: the window, and what recoding takes.
    """

    change: Change
    rate_rps: float
    before: dict[str, float]
    after: dict[str, float]
    quality: float
    ready_s: float

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**vars(self), "change": [self.change.knob, self.change.value]}

    @property
    def why(self) -> str:
        """One line with the predicted numbers."""
        moves = ", ".join(f"{name} {self.before[name]:.3g} -> {self.after[name]:.3g}" for name in self.before)
        return f"{self.change} at {self.rate_rps:.2f} requests/s: {moves}; loss per token {self.quality:+.2%}"


def predicted_effect(
    model: EffectModel, change: Change, observation: Observation, *, window_s: float = 10.0
) -> PredictedEffect | None:
    """The effect of a change on the next windows, None where it cannot be told: load or knobs unknown, or a knob whose
    effect nobody predicts.
    """
    load = load_of(observation)
    if load is None or change.knob not in KNOBS or any(knob not in observation.tunables for knob in KNOBS):
        return None
    if change.value not in TUNABLES[change.knob].values:
        return None
    now = [TUNABLES[knob].values.index(observation.tunables[knob]) for knob in KNOBS]
    then = list(now)
    then[KNOBS.index(change.knob)] = TUNABLES[change.knob].values.index(change.value)
    load = load.at(forecast_rps(observation))
    effects = model.for_pool(observation.pool_bytes).effects(np.array([now, then]), load, horizon_s=window_s)
    before, after = effects.row(0), effects.row(1)
    rate = load.rate_rps
    return PredictedEffect(
        change, rate, _features(before, rate), _features(after, rate), after.quality - before.quality,
        window_s + after.converge_s,
    )  # fmt: skip


def _features(effect: Effect, rate_rps: float) -> dict[str, float]:
    return {
        "kv_usage": effect.kv_occupancy,
        "running": effect.running,
        "ttft_tail_s": effect.ttft_s,
        "tbt_tail_s": effect.tbt_s,
        "goodput_rps": effect.goodput_share * rate_rps,
    }
