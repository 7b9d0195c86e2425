"""Runs on a toy: they learn, repeat, resume, stop, and are judged on episodes that they did not learn from."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sb3_contrib", reason="the extra 'train' is not installed")
pytest.importorskip("stable_baselines3", reason="the extra 'train' is not installed")

from toy_runs import last, recipe, rows, run, weights
from toy_training import Ticks, right, toys

from policies.card import PolicyFileError
from policies.split import HELD_OUT, TRAINING
from policies.train.folder import BEST, CHECKPOINTS
from policies.train.recipe import USUAL_WORKLOADS, Ppo, WarmStart, read_recipe, write_recipe
from policies.train.session import train


@pytest.mark.parametrize(
    ("algo", "steps"), [("maskable-ppo", 6144), pytest.param("dqn", 16384, marks=pytest.mark.slow)]
)
def test_it_solves_a_trivial_environment(algo: str, steps: int, tmp_path: Path) -> None:
    """Doing nothing is right half of the time, knowing what pays always."""
    found = run(recipe(algo, steps=steps, judge_every=16), tmp_path / "run")
    assert found["native"] < 0.7
    assert found["right"] == 1.0
    assert found["learned"] > 0.9


def test_nothing_that_evaluation_holds_out_is_learnt_from_by_default() -> None:
    names = {name for name, _, _ in USUAL_WORKLOADS}
    assert names <= set(TRAINING)
    assert not names & set(HELD_OUT)


def test_imitation_alone_does_what_the_teacher_does(tmp_path: Path) -> None:
    warm = WarmStart(rounds=2, episodes=4, epochs=120)
    run(recipe(steps=64, warm_start=warm, ppo=Ppo(learning_rate=3e-3)), tmp_path / "run")
    imitation = next(row["imitation"] for row in rows(tmp_path / "run") if "imitation" in row)
    assert imitation["agrees_on_changes"] > 0.95
    first = next(row for row in rows(tmp_path / "run") if "score" in row.get("held_out", {}))
    assert first["held_out"]["reward"] > 0.95


@pytest.mark.parametrize("algo", ["maskable-ppo", "ppo"])
def test_a_resumed_run_ends_with_the_same_weights(algo: str, tmp_path: Path) -> None:
    warm = WarmStart(rounds=1, episodes=1, epochs=2)
    whole = recipe(algo, steps=512, warm_start=warm)
    run(whole, tmp_path / "whole")
    run(recipe(algo, steps=256, warm_start=warm), tmp_path / "parts")
    (tmp_path / "parts" / "recipe.json").write_text(whole.model_dump_json())
    run(read_recipe(tmp_path / "parts"), tmp_path / "parts", resume=True)
    assert weights(tmp_path / "parts", last(tmp_path / "parts")) == weights(
        tmp_path / "whole", last(tmp_path / "whole")
    )
    learned = [row for row in rows(tmp_path / "whole") if "training" in row]
    again = [row for row in rows(tmp_path / "parts") if "training" in row]
    assert [row["training"] for row in again] == [row["training"] for row in learned]


def test_dqn_resumes_with_its_experience(tmp_path: Path) -> None:
    """Interrupted after a checkpoint; its exploration depends on where the end is, which stays the same."""
    made = recipe("dqn", steps=512)
    run(made, tmp_path / "whole")

    class Stop(Exception):  # noqa: N818
        pass

    def tell(progress: Any, _: str) -> None:
        if progress.steps > 300:
            raise Stop

    with pytest.raises(Stop):
        train(made, tmp_path / "parts", toys(made), teacher=right(), clock=Ticks(), tell=tell)
    run(made, tmp_path / "parts", resume=True)
    assert weights(tmp_path / "parts", last(tmp_path / "parts")) == weights(
        tmp_path / "whole", last(tmp_path / "whole")
    )


def test_two_processes_with_one_seed_get_the_same_weights_and_another_seed_does_not(tmp_path: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1] / "support")!r})
from pathlib import Path
from toy_runs import recipe, run, weights, last
folder = Path(sys.argv[1])
run(recipe(seed=3), folder)
print(weights(folder, last(folder)))
"""
    other = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "other")],
        check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=200,
    ).stdout.split()[-1]  # fmt: skip
    for seed in (3, 4):
        run(recipe(seed=seed), tmp_path / str(seed))
    assert weights(tmp_path / "3", last(tmp_path / "3")) == other
    assert weights(tmp_path / "4", last(tmp_path / "4")) != other


@pytest.mark.slow
def test_processes_change_nothing(tmp_path: Path) -> None:
    run(recipe(), tmp_path / "here")
    run(recipe(processes=True), tmp_path / "there")
    assert weights(tmp_path / "here", last(tmp_path / "here")) == weights(tmp_path / "there", last(tmp_path / "there"))


def test_it_stops_when_held_out_scores_get_no_better(tmp_path: Path) -> None:
    run(recipe(steps=100_000, patience=3, ppo=Ppo(learning_rate=1e-9)), tmp_path / "run")
    judged = [row for row in rows(tmp_path / "run") if "score" in row.get("held_out", {})]
    assert len(judged) == 4


def test_time_ends_a_run(tmp_path: Path) -> None:
    made = recipe(steps=None, minutes=1.0)
    train(made, tmp_path / "run", toys(made), teacher=right(), clock=Ticks(step_s=7.0), tell=lambda *_: None)
    assert rows(tmp_path / "run")[-1]["seconds"] == pytest.approx(60, abs=7)
    assert (tmp_path / "run" / BEST).is_dir()


@pytest.mark.parametrize(
    ("changes", "step_s", "why"),
    [
        ({"steps": None, "minutes": 1.0}, 7.0, "time is up"),
        ({"steps": 100_000, "patience": 3, "ppo": Ppo(learning_rate=1e-9)}, 0.0, "no better held-out score in 3"),
        ({"steps": 128}, 0.0, "all steps done"),
    ],
)
def test_a_run_that_has_ended_is_scored_again_and_not_trained_further(
    changes: dict[str, Any], step_s: float, why: str, tmp_path: Path
) -> None:
    made, said, stopped = recipe(**changes), [], []

    def tell(progress: Any, text: str) -> None:
        said.append(text)
        stopped.append(progress.stopped)

    def go(*, resume: bool) -> list[Any]:
        clock = Ticks(step_s=step_s)
        found = train(made, tmp_path, toys(made), teacher=right(), clock=clock, tell=tell, resume=resume)
        return [score.model_dump() for score in found]

    found = go(resume=False)
    before, written = (weights(tmp_path, last(tmp_path)), rows(tmp_path)), (tmp_path / "scores.json").read_bytes()
    (tmp_path / "scores.json").unlink()
    said.clear()
    assert go(resume=True) == found
    assert (weights(tmp_path, last(tmp_path)), rows(tmp_path)) == before
    assert (tmp_path / "scores.json").read_bytes() == written
    assert said[0].startswith("ended at ")
    assert why in said[0]
    assert stopped[-1], "what is told at the end says why it ended"


def test_a_run_whose_end_was_moved_goes_on(tmp_path: Path) -> None:
    made = recipe(steps=100_000, patience=3, ppo=Ppo(learning_rate=1e-9))
    run(made, tmp_path)
    before = last(tmp_path)
    run(made.model_copy(update={"patience": 4}), tmp_path, resume=True)
    assert last(tmp_path) > before


def test_a_run_that_stopped_before_its_first_checkpoint_begins_again_from_its_recipe(tmp_path: Path) -> None:
    """With all that it may have left; what somebody else put there stays."""
    made = recipe(steps=64)
    run(made, tmp_path / "whole")
    folder = tmp_path / "parts"
    for name in (BEST, "best.new", f"{CHECKPOINTS}/000000000064.new", "lessons", "tensorboard"):
        (folder / name).mkdir(parents=True)
        (folder / name / "half").write_text("x")
    write_recipe(made, folder)
    (folder / "metrics.jsonl").write_text('{"steps": 0}\n{"st')
    (folder / "notes.txt").write_text("x")
    run(read_recipe(folder), folder, resume=True)
    assert rows(folder) == rows(tmp_path / "whole")
    assert weights(folder) == weights(tmp_path / "whole")
    assert not (folder / "lessons").exists()
    assert (folder / "notes.txt").read_text() == "x"


def test_a_run_that_has_ended_does_not_begin_again_where_its_checkpoints_are_gone(tmp_path: Path) -> None:
    """The best model is what somebody kept of it."""
    made = recipe(steps=64)
    run(made, tmp_path)
    shutil.rmtree(tmp_path / CHECKPOINTS)
    before = weights(tmp_path), rows(tmp_path), (tmp_path / "scores.json").read_bytes()
    with pytest.raises(PolicyFileError, match="checkpoints are gone"):
        run(read_recipe(tmp_path), tmp_path, resume=True)
    assert (weights(tmp_path), rows(tmp_path), (tmp_path / "scores.json").read_bytes()) == before


def test_a_recipe_that_was_cut_off_leaves_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / ".recipe.json.0a1b2c3d.part").write_text('{"kind":')
    run(recipe(steps=64), tmp_path)
    assert read_recipe(tmp_path) == recipe(steps=64)


def test_folders_that_hold_something_else_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(PolicyFileError, match="not empty"):
        run(recipe(), tmp_path)
    with pytest.raises(PolicyFileError, match="no checkpoint"):
        run(recipe(), tmp_path, resume=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["notes.txt"]


def test_a_run_says_what_it_did(tmp_path: Path) -> None:
    run(recipe(), tmp_path / "run")
    assert read_recipe(tmp_path / "run") == recipe()
    found = rows(tmp_path / "run")
    assert [row["policy"] for row in found[:2]] == ["native", "right"]
    assert [row["steps"] for row in found if "training" in row] == list(range(64, 513, 64))
    assert all(np.isfinite(value) for row in found for value in row.get("learning", {}).values())
    assert len(list((tmp_path / "run" / CHECKPOINTS).iterdir())) == 3


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"knobs": ["gravity"]}, "no tunable 'gravity'"),
        ({"envs": 3}, "multiple of --group"),
        ({"minutes": 3.0}, "either --steps or --minutes"),
        ({"steps": None}, "either --steps or --minutes"),
        ({"algo": "dqn"}, "--group 1"),
        ({"short_s": 90.0}, "short <= long"),
    ],
)
def test_recipes_that_do_not_hang_together_are_refused(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        recipe(**{"group": 2, **changes})
