"""When a run ends, and why."""

from __future__ import annotations

from typing import Final

from policies.train.checkpoint import Progress
from policies.train.recipe import Lookahead, Recipe

ALL_STEPS: Final = "all steps done"
TIME_IS_UP: Final = "time is up"


def why_ended(progress: Progress, recipe: Recipe) -> str:
    """Why there is nothing left to do by the recipe as it is now, "" where there is."""
    if recipe.lookahead is not None and not progress.looked:
        return ""
    if recipe.steps is not None and progress.steps >= recipe.steps:
        return ALL_STEPS
    if time_is_up(progress, recipe):
        return TIME_IS_UP
    return impatient(progress) if progress.waited >= recipe.patience else ""


def time_is_up(progress: Progress, recipe: Recipe) -> bool:
    return recipe.minutes is not None and progress.seconds >= 60 * recipe.minutes


def impatient(progress: Progress) -> str:
    """Why a run ends that gets no better."""
    return f"no better held-out score in {progress.waited} judgements"


def may_look(progress: Progress, recipe: Recipe, plan: Lookahead) -> bool:
    """Whether there is another round of trying; of a run that a time ends, while they have not taken their share."""
    if recipe.minutes is None:
        return progress.rounds < plan.rounds
    return progress.seconds < 60 * plan.share * recipe.minutes
