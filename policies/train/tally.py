"""What an episode of training comes to: the reward of every interval, and the sums that its outcome tells."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, Self

import numpy as np

from envs.reward import Objective, RewardWeights
from policies.train.traffic import Episode

# So that a discounted sum of a hundred intervals stays near 1 to 10 for the critic.
REWARD_SCALE: Final = 0.1
# An interval is worth this at most, either way: what a storm of refusals costs more than that teaches nothing more.
MOST: Final = 5.0


@dataclass
class Tally:
    """Of ``steps`` intervals so far. ``reward``: of the service alone, without quality, not clipped; ``loss``: sum over
    tokens.
    """

    episode: Episode
    weights: RewardWeights
    interval_s: float
    quality_budget: float
    steps: int = 0
    reward: float = 0.0
    good: float = 0.0
    violations: float = 0.0
    tokens: float = 0.0
    loss: float = 0.0
    changes: int = 0

    def copy(self) -> Self:
        return replace(self)

    def add(self, info: dict[str, Any], price: float) -> float:
        """Count an interval by the simulated engine's ``info``; ``price`` of quality. Returns its reward."""
        true, terms, weights = info["true"], info["reward_terms"], self.weights
        episode, interval_s = self.episode, self.interval_s
        loss = (true["quality_per_token"] or 0.0) * true["tokens"]
        if weights.objective is Objective.INTERACTIVE:
            service = (weights.goodput * true["good"] - weights.violation * true["violations"]) / interval_s
        else:
            service = terms.gain - terms.violation
        service = (service - terms.switching) / episode.mean_rps
        self.steps += 1
        self.reward += service
        self.good += true["good"]
        self.violations += true["violations"]
        self.tokens += true["tokens"]
        self.loss += loss
        self.changes += info["applied"] is not None
        quality = price * loss / interval_s / episode.mean_tps / self.quality_budget
        return REWARD_SCALE * float(np.clip(service - quality, -MOST, MOST))

    def outcome(self) -> dict[str, Any]:
        """``source``, whether it began with ``default_knobs``, ``reward`` (mean per interval), ``goodput_rps``,
        ``attainment`` (None when nothing ended), ``tokens``, ``loss``, ``loss_per_token``, ``changes``.
        """
        ended, steps = self.good + self.violations, max(1, self.steps)
        return {
            "source": self.episode.source,
            "default_knobs": not self.episode.values,
            "reward": self.reward / steps,
            "goodput_rps": self.good / steps / self.interval_s,
            "attainment": self.good / ended if ended else None,
            "tokens": self.tokens,
            "loss": self.loss,
            "loss_per_token": self.loss / self.tokens if self.tokens else 0.0,
            "changes": float(self.changes),
        }
