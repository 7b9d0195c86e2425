"""Whom a run begins from: rules for all targets, or a predictor for each."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("sb3_contrib", reason="the extra 'train' is not installed")

from envs.profile import read_profile
from envs.signals import Targets
from envs.simulated import DEFAULT_PROFILE
from policies.rules import RuleError
from policies.train.env import TrainingEnv
from policies.train.judge import judge, static_act, teacher_act
from policies.train.recipe import Recipe, Source, WarmStart, checked
from policies.train.sweep import teacher_of
from policies.train.teacher import teacher_for
from policies.train.traffic import Traffic
from policies.train.vector import stack, training_envs

PROFILE = read_profile(DEFAULT_PROFILE)


def recipe(**changes: object) -> Recipe:
    source = Source(workload="chat-bursty", rate_scale=0.3, ttft_target_s=2.0, tbt_target_s=0.2)
    fields = {"sources": [source], "envs": 2, "group": 2, "processes": False, "episode_steps": 4, "steps": 64}
    return checked(Recipe.model_validate(fields | changes))


def test_rules_are_the_same_for_all_targets_and_a_predictor_is_not() -> None:
    rules = teacher_for(None, PROFILE)
    assert rules.name == teacher_for("default", PROFILE).name
    assert rules.policy(Targets()) is rules.policy(Targets(2.0, 0.2))
    predictor = teacher_for("predictor", PROFILE)
    assert predictor.policy(Targets()) is predictor.policy(Targets())
    assert predictor.policy(Targets()) is not predictor.policy(Targets(2.0, 0.2))


def test_an_environment_tells_the_targets_of_its_episode() -> None:
    made = recipe()
    env = TrainingEnv(made, PROFILE, Traffic(made), stream=0)
    assert env.look()[2] is None
    env.reset()
    assert env.look()[2] == Targets(2.0, 0.2)


def test_the_predictor_is_judged_like_any_other() -> None:
    made = recipe(warm_start=WarmStart(teacher="predictor"))
    normalised = stack(training_envs(made, PROFILE), made)
    try:
        teacher = teacher_of(made, PROFILE)
        played = judge(normalised, lambda: teacher_act(teacher, 2), 2)
        assert len(played) == len(judge(normalised, static_act, 2)) == 2
    finally:
        normalised.close()


@pytest.mark.parametrize("name", ["nowhere.yaml", "predictors"])
def test_a_teacher_that_is_none_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(RuleError):
        teacher_for(str(tmp_path / name), PROFILE)
