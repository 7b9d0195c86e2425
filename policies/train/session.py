"""One training run in one folder: warm start, learning, judgements on held-out episodes, checkpoints, resuming.

A rollout is one whole episode of every environment, and episodes are numbered and planned, so that between rollouts
nothing is under way: there a run is judged and saved, and from there it goes on bit for bit as if never interrupted
(CPU, one thread, same versions; with ``minutes`` the end itself depends on the machine).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3 import DQN
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecNormalize

from engine.clock import Clock
from engine.whole_file import write_whole
from policies.card import Score
from policies.train import checkpoint
from policies.train.algorithms import Algorithm, build
from policies.train.beginning import back_to, stand
from policies.train.checkpoint import Progress
from policies.train.ending import ALL_STEPS, TIME_IS_UP, impatient, may_look, time_is_up, why_ended
from policies.train.final import final_scores
from policies.train.folder import BEST, CHECKPOINTS, SCORES, check_new, place_to_resume
from policies.train.imitate import warm_start
from policies.train.judge import Act, judge, learned_act, score, static_act, teacher_act
from policies.train.price import next_price
from policies.train.recipe import Lookahead, Recipe, write_recipe
from policies.train.rounds import Rounds
from policies.train.rows import Rows, figures, logger, said
from policies.train.teacher import Teacher
from policies.train.vector import MakeEnv, outcomes, raw, stack
from policies.train.worth import Learner, sharpen
from policies.training_range import RangeRecorder

KEPT: Final = 3  # checkpoints
_ENDLESS_STEPS: Final = 1 << 40
Tell = Callable[[Progress, str], None]
"""Gets where the run is and one line when there is something to say ("" otherwise)."""


def train(
    recipe: Recipe, folder: Path, make_env: MakeEnv, *, teacher: Teacher, clock: Clock, tell: Tell, resume: bool = False
) -> list[Score]:
    """Train, and return the scores of the best model, of static native and of the teacher on held-out episodes.

    With ``resume`` a run goes on from its last checkpoint, or begins again where it stopped before the first; one that
    has ended is scored again. Raises PolicyFileError for a folder that cannot be used, OSError.
    """
    start = place_to_resume(folder) if resume else None
    if not resume:
        check_new(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_recipe(recipe, folder)
    torch.set_num_threads(1)  # small networks: faster, and the same sums in the same order everywhere
    normalised = stack(make_env, recipe)
    try:
        model = build(recipe, normalised)
        run = _Run(recipe, folder, model, normalised, teacher, clock, tell)
        if start is None:
            run.begin()
        else:
            run.resume(start)
        if not run.progress.stopped:
            run.look_ahead()
            run.learn()
        return run.finish()
    finally:
        normalised.close()


class _Run(BaseCallback):
    """The callback that keeps a run: what happens between rollouts."""

    def __init__(
        self, recipe: Recipe, folder: Path, model: Algorithm, normalised: VecNormalize, teacher: Teacher, clock: Clock,
        tell: Tell,
    ) -> None:  # fmt: skip
        super().__init__()
        self.recipe, self.folder, self.algorithm, self.normalised = recipe, folder, model, normalised
        self.teacher, self.clock, self.tell = teacher, clock, tell
        self.seen, self.progress = RangeRecorder(), Progress(price=recipe.price)
        self._row_steps = recipe.envs * recipe.episode_steps
        self._began_ns, self._before_s = clock.now_ns(), 0.0
        self._outcomes: list[dict[str, Any]] = []
        self._done_at = -1
        model.set_logger(logger(folder))
        self._rows = Rows(folder, model.logger)

    # -- beginning, middle and end ---------------------------------------------------------------------------------

    def begin(self) -> None:
        progress, number = self.progress, self.normalised.num_envs
        for name, act in (("native", static_act), (self.teacher.name, lambda: teacher_act(self.teacher, number))):
            played = self._judge(act)
            progress.baselines[name] = score(played, self.recipe.quality_budget)
            self._rows.write({"steps": 0, "policy": name, "held_out": figures(played)}, progress)
            self.tell(progress, f"{name}: held-out score {progress.baselines[name]:.4f}, {said(played)}")
        if self.recipe.warm_start is not None:
            found = warm_start(self.algorithm, self.normalised, self.recipe, self.teacher, self.seen.add)
            self._rows.write({"steps": 0, "imitation": found}, progress)
            agrees, changing = found["agrees"], found["agrees_on_changes"]
            self.tell(progress, f"imitates {self.teacher.name}: {agrees:.1%} of ticks, {changing:.1%} of changes")

    def resume(self, start: Path) -> None:
        self.progress = checkpoint.load(start, self.algorithm, self.normalised, self.seen)
        self._before_s, self.progress.stopped = self.progress.seconds, why_ended(self.progress, self.recipe)
        raw(self.normalised).env_method("set_price", self.progress.price)
        if self.progress.looked or self.recipe.lookahead is None:  # else reinforcement has not begun
            self._done_at = self.algorithm.num_timesteps
        self._rows.cut(self.progress)
        steps, ended = self.progress.steps, self.progress.stopped
        self.tell(self.progress, f"ended at {steps} steps: {ended}" if ended else f"resumed at {steps} steps")

    def look_ahead(self) -> None:
        """Rounds of trying and learning what it came to; a run that is past them is left as it is."""
        plan, progress = self.recipe.lookahead, self.progress
        if plan is None or progress.looked:
            return
        learner = cast("Learner", self.algorithm)
        rounds = Rounds(self.recipe, plan, self.folder, learner, self.normalised, progress.rounds)
        if progress.best is None:  # what imitation alone came to may stay the best
            sharpen(learner, 1 / plan.sharpen)  # its preferences are taken for small worths: what is tried says more
            self._judge_and_save(self._rows.begun(progress, self._outcomes))
        while self._may_look(plan):
            found, self._outcomes = rounds.play(progress, self.seen)
            row = {**self._rows.begun(progress, self._outcomes), "lookahead": found}
            self._set_price()
            self._outcomes.clear()
            got, best = (100 * plan.unit * found[name] for name in ("got", "best"))
            self.tell(
                progress,
                f"round {progress.rounds}, {progress.tried} actions tried: its choices bring {got:.2f} % of the load, "
                f"the best of those tried {best:.2f} %",
            )
            self._judge_and_save(row)
        if progress.waited:  # later rounds made it worse: on from where it was best
            checkpoint.load(self.folder / BEST, self.algorithm, self.normalised, RangeRecorder())
        progress.waited, progress.stopped, progress.looked = 0, "", True
        sharpen(learner, plan.sharpen)

    def learn(self) -> None:
        vectors = back_to(self.normalised, self.progress.episode)
        if self._done_at < 0:
            cast("RunningMeanStd", self.normalised.obs_rms).update(vectors)  # as every later first observation is
        stand(self.algorithm, self.normalised, vectors)
        total = self.recipe.steps or _ENDLESS_STEPS
        left = -(-total // self._row_steps) * self._row_steps - self.algorithm.num_timesteps
        if isinstance(self.algorithm, DQN):
            self.algorithm.exploration_rate = self.algorithm.exploration_schedule(
                1 - self.algorithm.num_timesteps / total
            )
        if left > 0:
            self.algorithm.learn(left, callback=self, reset_num_timesteps=False)

    def finish(self) -> list[Score]:
        """Scores of the best model on episodes that chose nothing."""
        best = checkpoint.load(self.folder / BEST, self.algorithm, self.normalised, RangeRecorder())
        found = final_scores(
            self.algorithm, self.normalised, self.recipe, self.teacher, lambda line: self.tell(self.progress, line)
        )
        document = {"steps": best.best_steps, "scores": [score.model_dump() for score in found]}
        write_whole(self.folder / SCORES, json.dumps(document, indent=1) + "\n")
        return found

    def _may_look(self, plan: Lookahead) -> bool:
        self.progress.seconds = self._seconds()
        return may_look(self.progress, self.recipe, plan)

    def _seconds(self) -> float:
        return self._before_s + (self.clock.now_ns() - self._began_ns) / 1e9

    # -- the callback ----------------------------------------------------------------------------------------------

    def _on_rollout_start(self) -> None:
        if self.num_timesteps % self._row_steps == 0:
            self._between()

    def _on_step(self) -> bool:
        self.seen.add(cast("NDArray[np.float32]", self.normalised.get_original_obs()))
        self._outcomes += outcomes(self.locals["infos"])
        self.progress.steps = self.num_timesteps
        self.tell(self.progress, "")
        return not self.progress.stopped

    def _on_training_end(self) -> None:
        if not self.progress.stopped and self.num_timesteps % self._row_steps == 0:
            self.progress.stopped = ALL_STEPS
            self._between()

    # -- between rollouts ------------------------------------------------------------------------------------------

    def _between(self) -> None:
        progress, recipe = self.progress, self.recipe
        if self._done_at == self.algorithm.num_timesteps:
            return
        self._done_at = progress.steps = self.algorithm.num_timesteps
        progress.episode = progress.steps // self._row_steps
        progress.seconds = self._seconds()
        if time_is_up(progress, recipe):
            progress.stopped = TIME_IS_UP
        row = self._rows.begun(progress, self._outcomes)
        self._set_price()
        if progress.episode % recipe.judge_every == 0 or progress.stopped:
            self._judge_and_save(row)
        else:
            self._rows.write(row, progress)
        self._outcomes.clear()

    def _judge_and_save(self, row: dict[str, Any]) -> None:
        progress = self.progress
        played = self._judge(lambda: learned_act(self.algorithm, self.normalised))
        now = score(played, self.recipe.quality_budget)
        self._rows.judged(row, now, played)
        is_best = progress.best is None or now > progress.best
        progress.waited = 0 if is_best else progress.waited + 1
        if is_best:
            progress.best, progress.best_steps = now, progress.steps
        if progress.waited >= self.recipe.patience and not progress.stopped:
            progress.stopped = impatient(progress)
        self._rows.write(row, progress)  # before the checkpoint, which counts it: one that is cut off comes again
        if is_best:
            self._save(self.folder / BEST)
        self._save(self.folder / CHECKPOINTS / f"{progress.steps:012d}")
        for old in sorted((self.folder / CHECKPOINTS).glob("[0-9]*[0-9]"))[:-KEPT]:
            shutil.rmtree(old)
        against = ", ".join(f"{name} {value:.4f}" for name, value in progress.baselines.items())
        mark = ", the best so far" if is_best else ""
        self.tell(progress, f"{progress.steps} steps: held-out score {now:.4f}{mark} ({against}), {said(played)}")
        back_to(self.normalised, progress.episode)

    def _set_price(self) -> None:
        self.progress.price = next_price(self.progress.price, self._outcomes, self.recipe)
        raw(self.normalised).env_method("set_price", self.progress.price)

    def _judge(self, make_act: Callable[[], Act]) -> list[dict[str, Any]]:
        return judge(self.normalised, make_act, self.recipe.judge_episodes)

    def _save(self, folder: Path) -> None:
        checkpoint.save(folder, self.algorithm, self.normalised, self.seen, self.progress)
