"""Several runs: how they multiply, and which of them is the best."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("sb3_contrib", reason="the extra 'train' is not installed")

from policies.executors import Serial
from policies.train import sweep
from policies.train.recipe import Recipe, Source
from policies.train.sweep import Job, Outcome, best_run, jobs_of, profile_of, resolved_jobs, run_all
from policies.train.traffic import RESOLVED_BY


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


def test_rates_and_targets_are_those_of_each_runs_own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, int | None]] = []

    def resolve(recipe: Recipe, _: object) -> list[Source]:
        asked.append((recipe.length_scale, recipe.pool_bytes))
        return [Source(workload="chat-steady", rate_scale=recipe.length_scale, ttft_target_s=1.0 / len(asked))]

    monkeypatch.setattr(sweep, "resolve", resolve)
    base = Recipe(steps=10, sources=[Source(workload="chat-steady")])
    jobs = jobs_of(base, tmp_path, [0, 1], ["length_scale=2,4", "pool_bytes=2147483648,4294967296", "ppo.epochs=1,2"])
    found = resolved_jobs(jobs)
    assert asked == [(2.0, 2 << 30), (2.0, 4 << 30), (4.0, 2 << 30), (4.0, 4 << 30)], "each once, whatever the seed"
    assert [job.label for job in found] == [job.label for job in jobs]
    for job in found:
        settings = (job.recipe.length_scale, job.recipe.pool_bytes)
        assert job.recipe.sources[0].rate_scale == job.recipe.length_scale
        assert job.recipe.sources[0].ttft_target_s == 1.0 / (1 + asked.index(settings))
        assert job.recipe.profile_digest == profile_of(base).digest


def test_nothing_else_decides_rates_and_targets() -> None:
    base = Recipe(steps=10, sources=[Source(workload="chat-steady")], length_scale=4.0, pool_bytes=2 << 30)
    other = Recipe(
        **base.model_dump(include=set(RESOLVED_BY)),
        minutes=3.0,
        seed=5,
        algo="ppo",
        interval_s=1.0,
        knobs=["kv_format"],
    )
    assert sweep.resolved(base).sources == sweep.resolved(other).sources
    shorter = base.model_copy(update={"length_scale": 8.0})
    assert sweep.resolved(base).sources[0].ttft_target_s != sweep.resolved(shorter).sources[0].ttft_target_s


def test_a_run_that_nothing_can_be_played_with_is_named_before_any_begins(tmp_path: Path) -> None:
    base = Recipe(steps=10, sources=[Source(workload="chat-steady", rate_scale=0.1)])
    with pytest.raises(ValueError, match=r"seed-0_pool_bytes-1024: ") as caught:
        resolved_jobs(jobs_of(base, tmp_path, [0], ["pool_bytes=1024,2147483648"]))
    assert "\n" not in str(caught.value)
