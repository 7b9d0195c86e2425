"""Several runs: how they multiply, and which of them is the best."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("sb3_contrib", reason="the extra 'train' is not installed")

from policies.executors import Serial
from policies.train import sweep
from policies.train.recipe import Recipe
from policies.train.sweep import Job, Outcome, best_run, jobs_of, run_all


def test_seeds_and_settings_multiply(tmp_path: Path) -> None:
    jobs = jobs_of(Recipe(steps=10), tmp_path, [0, 1], ["ppo.learning_rate=1e-4,3e-4", "episode_steps=64"])
    assert [(job.recipe.seed, job.recipe.ppo.learning_rate, job.recipe.episode_steps) for job in jobs] == [
        (0, 1e-4, 64),
        (1, 1e-4, 64),
        (0, 3e-4, 64),
        (1, 3e-4, 64),
    ]
    assert len({job.folder for job in jobs}) == 4
    assert all(Path(job.folder).parent == tmp_path for job in jobs)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("learning_rate", "KEY=VALUE"),
        ("=3", "KEY=VALUE"),
        ("ppo.colour=1", "no ppo.colour"),
        ("envs.x=1", "no envs.x"),
        ("envs=many", "envs"),
        ("knobs=3", "knobs"),
        ("ppo.epochs=1,1", "twice"),
    ],
)
def test_settings_that_no_recipe_has_are_one_line(text: str, expected: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=expected) as caught:
        jobs_of(Recipe(steps=10), tmp_path, [0], [text])
    assert "\n" not in str(caught.value)


def fake_run(job: Job) -> Outcome:
    Path(job.folder).mkdir(parents=True)
    return Outcome(job.label, job.folder, float(job.recipe.seed % 3), 10, "done", [])


def test_the_best_run_comes_first_and_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "run", fake_run)
    found = run_all(jobs_of(Recipe(steps=10), tmp_path, range(5), []), Serial(), tmp_path)
    assert found[0].score == 2.0
    assert best_run(tmp_path) == tmp_path / "seed-2"
    assert best_run(tmp_path / "seed-1") == tmp_path / "seed-1"
    assert len(json.loads((tmp_path / "runs.json").read_text())) == 5
    for bad in ("[]", "{}", '[{"label": "../../etc"}]', "[" * 9999):
        (tmp_path / "runs.json").write_text(bad)
        with pytest.raises(ValueError, match=r"runs\.json"):
            best_run(tmp_path)
