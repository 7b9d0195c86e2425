"""Runs on a toy, and what they left: for tests of training."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from toy_training import Ticks, right, toys

from policies.train.archive import POLICY, read_states
from policies.train.folder import BEST, CHECKPOINTS, METRICS
from policies.train.recipe import Dqn, Ppo, Recipe, checked
from policies.train.session import train


def recipe(algo: str = "maskable-ppo", **changes: Any) -> Recipe:
    fields: dict[str, Any] = {
        "algo": algo,
        "steps": 512,
        "envs": 4,
        "group": 1 if algo == "dqn" else 2,
        "processes": False,
        "episode_steps": 16,
        "hidden": [16],
        "warm_start": None,
        "judge_every": 2,
        "judge_episodes": 4,
        "patience": 100,
        "ppo": Ppo(batch_size=64, learning_rate=3e-3, entropy=0.01),
        "dqn": Dqn(batch_size=64, first_steps=64, learning_rate=1e-3, gamma=0.9, target_every=200),
    }
    return checked(Recipe(**{**fields, **changes}))


def run(made: Recipe, folder: Path, **more: Any) -> dict[str, float]:
    said: list[str] = []
    scores = train(
        made, folder, toys(made), teacher=right(), clock=Ticks(), tell=lambda _, text: said.append(text), **more
    )
    assert [text for text in said if text]
    return {f"{score.policy}": score.mean for score in scores if score.figure == "reward"}


def weights(folder: Path, name: str = BEST) -> str:
    state = read_states(folder / name / "model.zip")[POLICY]
    return hashlib.sha256(b"".join(state[key].numpy().tobytes() for key in sorted(state))).hexdigest()


def last(folder: Path) -> str:
    return f"{CHECKPOINTS}/{max(entry.name for entry in (folder / CHECKPOINTS).iterdir())}"


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
