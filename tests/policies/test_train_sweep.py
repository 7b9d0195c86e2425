"""Several runs: how they multiply, where they run, and that both ways of running them come to the same."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sb3_contrib", reason="the extra 'train' is not installed")

from policies.train import sweep
from policies.train.executor import LocalExecutor, RayExecutor, RayUnavailableError
from policies.train.recipe import Recipe
from policies.train.sweep import Job, Outcome, best_run, jobs_of, run_all


class FakeRay:
    """The part of Ray's interface that is used."""

    class exceptions:  # noqa: N801
        class RayTaskError(Exception):
            cause: Exception

    def __init__(self) -> None:
        self.inits: list[dict[str, Any]] = []
        self.cpus: list[float] = []
        self.is_up = False

    def init(self, **options: Any) -> None:
        if options["address"] == "nowhere:1":
            raise ConnectionError("no cluster at nowhere:1\nand more lines")
        self.inits.append(options)
        self.is_up = True

    def remote(self, *, num_cpus: float) -> Any:
        self.cpus.append(num_cpus)

        class Task:
            def __init__(self, function: Any) -> None:
                self.function = function

            def remote(self, job: Any) -> Any:
                return self.function, job

        return Task

    def get(self, tasks: list[Any]) -> list[Any]:
        try:
            return [function(job) for function, job in tasks]
        except ValueError as error:
            wrapped = self.exceptions.RayTaskError("task failed")
            wrapped.cause = error
            raise wrapped from error

    def shutdown(self) -> None:
        self.is_up = False


def square(number: int) -> int:
    if number < 0:
        raise ValueError("negative")
    return number * number


def executors() -> list[Any]:
    return [LocalExecutor(), RayExecutor("local", ray=FakeRay())]


@pytest.mark.parametrize("executor", executors(), ids=["local", "ray"])
def test_an_executor_keeps_the_order_and_raises_what_a_job_raises(executor: Any) -> None:
    assert executor.map(square, [3, 1, 2]) == [9, 1, 4]
    with pytest.raises(ValueError, match="negative"):
        executor.map(square, [1, -1])


@pytest.mark.slow
def test_a_real_ray_runs_jobs() -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    cluster = RayExecutor("local")
    try:
        assert cluster.map(square, [3, 1, 2]) == [9, 1, 4]
        with pytest.raises(ValueError, match="negative"):
            cluster.map(square, [-1])
    finally:
        cluster.close()


def test_a_cluster_out_of_reach_is_one_line() -> None:
    with pytest.raises(RayUnavailableError, match=r"nowhere:1 cannot be used: no cluster at nowhere:1$"):
        RayExecutor("nowhere:1", ray=FakeRay())


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RayUnavailableError, match="pip install"):
        RayExecutor("auto")


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
    ],
)
def test_settings_that_no_recipe_has_are_one_line(text: str, expected: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=expected) as caught:
        jobs_of(Recipe(steps=10), tmp_path, [0], [text])
    assert "\n" not in str(caught.value)


def fake_run(job: Job) -> Outcome:
    Path(job.folder).mkdir(parents=True)
    return Outcome(job.label, job.folder, float(job.recipe.seed % 3), 10, "done", [])


@pytest.mark.parametrize("executor", executors(), ids=["local", "ray"])
def test_the_best_run_comes_first_and_is_found_again(
    executor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "run", fake_run)
    found = run_all(jobs_of(Recipe(steps=10), tmp_path, range(5), []), executor, tmp_path)
    assert found[0].score == 2.0
    assert best_run(tmp_path) == tmp_path / "seed-2"
    assert best_run(tmp_path / "seed-1") == tmp_path / "seed-1"
    assert len(json.loads((tmp_path / "runs.json").read_text())) == 5
    for bad in ("[]", "{}", '[{"label": "../../etc"}]', "[" * 9999):
        (tmp_path / "runs.json").write_text(bad)
        with pytest.raises(ValueError, match=r"runs\.json"):
            best_run(tmp_path)
