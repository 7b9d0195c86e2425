"""The scores that a run ends with, on episodes that chose nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from stable_baselines3.common.vec_env import VecNormalize

from policies.card import Score
from policies.train.algorithms import Algorithm
from policies.train.judge import Act, judge, learned_act, score, scores, static_act, teacher_act
from policies.train.recipe import Recipe
from policies.train.rows import said
from policies.train.teacher import Teacher

FINAL_FIRST: Final = 10_000  # held-out episodes of the final scores: none that chose the best model


def final_scores(
    model: Algorithm, normalised: VecNormalize, recipe: Recipe, teacher: Teacher, tell: Callable[[str], None]
) -> list[Score]:
    """Of the model as it is now, of static native and of the teacher; ``tell`` gets a line about each."""
    episodes, number, found = 2 * recipe.judge_episodes, normalised.num_envs, list[Score]()
    acts: list[tuple[str, Callable[[], Act]]] = [
        ("learned", lambda: learned_act(model, normalised)),
        ("native", static_act),
        (teacher.name, lambda: teacher_act(teacher, number)),
    ]
    for name, act in acts:
        played = judge(normalised, act, episodes, FINAL_FIRST)
        found += scores(name, played)
        tell(f"{name}, {episodes} new episodes: score {score(played, recipe.quality_budget):.4f}, {said(played)}")
    return found
