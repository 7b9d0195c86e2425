"""Rounds of looking ahead: play and try in every environment, keep what it came to, learn from all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecNormalize

from policies.train.checkpoint import Progress
from policies.train.lessons import read_lessons, write_lessons
from policies.train.lookahead import NONE, Studied
from policies.train.recipe import Lookahead, Recipe
from policies.train.vector import raw
from policies.train.worth import Learner, Trials, fit, student_of
from policies.training_range import RangeRecorder

_EPISODES_FROM: Final = 1 << 10  # apart, behind those of imitation


class Rounds:
    """The rounds of one run. ``done``: how many are in its folder already. Raises PolicyFileError for damaged ones."""

    def __init__(
        self, recipe: Recipe, plan: Lookahead, folder: Path, model: Learner, normalised: VecNormalize, done: int
    ) -> None:
        self._recipe, self._plan, self._folder = recipe, plan, folder
        self._model, self._normalised = model, normalised
        self._lessons: list[Studied] = read_lessons(folder, done)

    def play(self, progress: Progress, seen: RangeRecorder) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """One more: counts it in ``progress``, and shows ``seen`` what was observed. Returns what
        :func:`policies.train.worth.fit` found, with ``rounds`` and ``tried``, and the outcomes of its episodes.
        """
        number, plan = progress.rounds, self._plan
        studied = self._studied(number)
        for one in studied:
            seen.add(one.seen)
            cast("RunningMeanStd", self._normalised.obs_rms).update(one.seen)
        write_lessons(self._folder, number, studied)
        self._lessons += studied
        rng = np.random.default_rng([self._recipe.seed, 3, number])
        found = fit(self._model, self._normalised, Trials.of(self._lessons), plan, rng)
        progress.rounds += 1
        progress.tried += sum(int((one.actions != NONE).sum()) for one in studied)
        return {**found, "rounds": progress.rounds, "tried": progress.tried}, [one.outcome for one in studied]

    def _studied(self, number: int) -> list[Studied]:
        """An episode of every environment, each in its own process and at its own pace."""
        student = student_of(self._model, self._normalised, self._recipe)
        played = raw(self._normalised).env_method("study", _EPISODES_FROM + number, student, self._plan)
        return cast("list[Studied]", played)
