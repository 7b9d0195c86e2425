"""``autotune train`` and ``autotune export``: a user's mistakes are one line, and a short run becomes a policy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("sb3_contrib", reason="the extra 'train' is not installed")

from autotune.cli import app
from autotune.cli._shared import CliError
from envs.profile import read_profile
from envs.simulated import DEFAULT_PROFILE
from policies.learned import load_learned
from policies.rules import load_rules
from policies.threshold import ThresholdPolicy
from policies.train import sweep
from policies.train.recipe import read_recipe


def refusal(*arguments: str) -> CliError:
    result = CliRunner().invoke(app, list(arguments))
    assert isinstance(result.exception, CliError), result.exception
    assert "\n" not in str(result.exception)
    return result.exception


@pytest.mark.parametrize(
    ("arguments", "expected", "code"),
    [
        (["--algo", "sac"], "algo", 2),
        (["--workload", "chat-of-cats"], "chat-of-cats", 2),
        (["--workload", "chat-steady@fast"], "NAME@RATE", 2),
        (["--workload", "chat-steady@-1"], "rate_scale", 2),
        (["--workload", "chat-steady@1e308"], "rate_scale", 2),
        (["--workload", "chat-steady:1@1"], "NAME:PROMPTS:OUTPUTS", 2),
        (["--workload", "chat-steady:1:0@1"], "output_scale", 2),
        (["--workload", "chat-steady:nan:1@1"], "prompt_scale", 2),
        (["--interval", "1e-12"], "interval_s", 2),
        (["--length-scale", "1e308"], "length_scale", 2),
        (["--envs", "100000", "--group", "1"], "envs", 2),
        (["--trace", "/nowhere.csv"], "nowhere.csv", 2),
        (["--profile", "/nowhere.yaml"], "nowhere.yaml", 1),
        (["--knobs", "gravity"], "gravity", 2),
        (["--steps", "10", "--minutes", "1"], "either --steps or --minutes", 2),
        (["--envs", "3", "--group", "2"], "multiple of --group", 2),
        (["--algo", "dqn"], "--steps", 2),
        (["--teacher", "nobody.yaml"], "nobody.yaml", 2),
        # Nor could a card say which file: the exported policy takes along only whom it can name.
        (["--advised", "--teacher", "own.yaml"], "by name: one of default, literature, predictor", 2),
        (["--kv-pool-bytes", "many"], "many", 2),
        (["--objective", "fun"], "objective", 2),
        (["--seeds", "2", "--sweep", "colour=red", "--workload", "chat-steady@0.1"], "no colour", 2),
        # What no card could say would be found out when the run is exported, and one row at a time is no batch.
        (["--sweep", "hidden=[5000]", "--workload", "chat-steady@0.1"], "hidden.0", 2),
        (["--sweep", "ppo.batch_size=1", "--workload", "chat-steady@0.1"], "ppo.batch_size", 2),
        (["--resume"], "no training run", 1),
        (["--resume", "--seeds", "2"], "its own folder", 2),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], expected: str, code: int, tmp_path: Path) -> None:
    error = refusal("train", "-o", str(tmp_path / "run"), *arguments)
    assert expected in str(error)
    assert error.code == code
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("workloads", "named"),
    [
        (["chat-steady@0.1"], None),
        (["chat-steady@0.1", "flash-crowd@0.1", "reasoning-long@0.1"], "reasoning-long, flash-crowd"),
    ],
)
def test_training_on_what_is_held_out_is_warned_of(
    workloads: list[str], named: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "run", lambda job, _: sweep.Outcome("", job.folder, 0.5, 10, "done", []))
    options = [part for name in workloads for part in ("--workload", name)]
    result = CliRunner().invoke(app, ["train", "-o", str(tmp_path / "run"), "--steps", "10", *options])
    assert result.exit_code == 0, result.output
    warned = [line for line in result.stderr.splitlines() if line.startswith("warning: ")]
    assert len(warned) == (named is not None)
    assert named is None or f"warning: {named} held out for judging" in warned[0]


def test_what_is_no_run_is_not_exported(tmp_path: Path) -> None:
    assert "no training run" in str(refusal("export", str(tmp_path), "-o", str(tmp_path / "policy")))
    assert not (tmp_path / "policy").exists()


@pytest.mark.parametrize("verb", [["train", "-o", "x"], ["export", "x"]])
def test_without_the_extra_it_says_what_to_install(verb: list[str], tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['sb3_contrib'] = sys.modules['stable_baselines3'] = sys.modules['torch'] = None\n"
        "from autotune.cli import main; main()"
    )
    command = [sys.executable, "-c", code, *verb]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=_env(), check=False)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "pip install 'kv-autotune[train]'" in done.stderr


def _env() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


@pytest.mark.slow
def test_a_short_run_becomes_a_policy_that_fits_its_profile(tmp_path: Path) -> None:
    run, policy = tmp_path / "run", tmp_path / "policy"
    arguments = ["train", "-o", str(run), "--steps", "256", "--envs", "2", "--group", "2"]
    arguments += ["--no-lookahead", "--workload", "chat-steady"]
    result = CliRunner().invoke(app, [*arguments, "--seed", "1"])
    assert result.exit_code == 0, result.output
    assert CliRunner().invoke(app, ["export", str(run), "-o", str(policy)]).exit_code == 0
    card: dict[str, Any] = json.loads((policy / "card.json").read_text())
    profile = read_profile(DEFAULT_PROFILE)
    assert card["profile"]["digest"] == profile.digest
    assert card["training"]["traffic"][0]["rate_scale"] == read_recipe(run).sources[0].rate_scale
    assert {score["policy"] for score in card["scores"]} == {"learned", "native", "rules:default"}
    load_learned(policy, fallback=ThresholdPolicy(load_rules("default")), profile_digest=profile.digest)
