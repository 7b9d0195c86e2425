"""Cards and weights of policies that nobody trained, for tests of what reads and runs them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from engine.tunables import TUNABLES
from envs import SIMULATED_ENGINE_ID
from envs.features import FEATURES
from envs.spaces import Observation
from policies.advice_input import ADVICE_ENTRIES
from policies.card import (
    Card,
    GuardLimits,
    Network,
    Normaliser,
    ProfileOf,
    Range,
    Score,
    Spaces,
    Tensors,
    Traffic,
    Training,
)
from policies.guard import GuardConfig

HIDDEN = (32, 24)


def tensors_of(network: Network, seed: int = 0, scale: float = 0.5) -> Tensors:
    rng, result = np.random.default_rng(seed), {}
    for layer, shape in enumerate(network.shapes()):
        result[f"{layer}.weight"] = (scale * rng.standard_normal(shape)).astype(np.float32)
        result[f"{layer}.bias"] = rng.standard_normal(shape[0]).astype(np.float32)
    return result


def card(**changes: Any) -> Card:
    """A card that this program accepts, whose training saw everything. ``changes`` replace fields."""
    spaces = Spaces.current()
    entries = len(spaces.observation)
    fields: dict[str, Any] = {
        "name": "made-up",
        "created": "2026-11-30T00:00:00Z",
        "algorithm": "maskable-ppo",
        "environment": SIMULATED_ENGINE_ID,
        "spaces": spaces,
        "interval_s": 2.0,
        "short_s": 10.0,
        "long_s": 60.0,
        "objective": "interactive",
        "ttft_target_s": 2.0,
        "tbt_target_s": 0.25,
        "guard": GuardLimits.of(GuardConfig()),
        "network": Network(activation="tanh", widths=[entries, *HIDDEN, spaces.actions]),
        "normaliser": Normaliser(mean=[0.3] * entries, var=[0.05] * entries, epsilon=1e-3, clip=10.0),
        "ranges": [Range(low=0.0, high=1.0, unknown=True)] * len(FEATURES),
        "training": Training(
            traffic=[Traffic(name="chat-bursty", rate_scale=0.2)],
            seed=0,
            steps=1000,
            episodes=10,
            episode_s=256.0,
            envs=2,
            teacher="default",
            randomisation={"rate": (0.5, 2.0)},
        ),
        "scores": [Score(policy="learned", figure="reward", mean=0.5, low=0.4, high=0.6, episodes=8)],
        "profile": ProfileOf(digest="0" * 64, description="a profile", estimated=True),
        "sha256": "0" * 64,
        "versions": {"numpy": np.__version__},
    }
    return Card(**{**fields, **changes})


def advised_card(**changes: Any) -> Card:
    """As :func:`card`, for a policy that sees what the default rules would do."""
    spaces = Spaces.current(advised=True)
    entries = len(spaces.observation)
    fields: dict[str, Any] = {
        "advisor": "default",
        "spaces": spaces,
        "network": Network(activation="tanh", widths=[entries, 8, spaces.actions], skip=ADVICE_ENTRIES),
        "normaliser": Normaliser(mean=[0.0] * entries, var=[0.999] * entries, epsilon=1e-3, clip=10.0),
    }
    return card(**{**fields, **changes})


def observation(seed: int, *, stamp_s: float = 100.0, held: frozenset[str] = frozenset(), **values: Any) -> Observation:
    """Everything known, anywhere in its range; ``values`` replace figures."""
    rng = random.Random(seed)
    seen = {f.name: f.low + rng.random() ** 3 * (f.high - f.low) for f in FEATURES} | values
    knobs = {name: rng.choice(tunable.values) for name, tunable in TUNABLES.items()}
    return Observation(round(1e9 * stamp_s), seen, knobs, held, 99.0, "a")
