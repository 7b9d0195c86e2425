"""``policy: {use: auto}`` in the daemon: what it took and why not the rest, in log, status, metrics and for people."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from policy_cards import card, tensors_of
from typer.testing import CliRunner
from verdict_files import judged, put, verdict

from autotune.cli import app
from autotune.cli.status import _choice_lines
from autotune.config import load_config
from autotune.wiring import check_rules, policy_of
from envs.profile import read_profile
from envs.simulated import DEFAULT_PROFILE
from policies import auto
from policies.card import ProfileOf, Score
from policies.choice import AutoPolicy
from policies.export import export_policy
from policies.predictor import PredictorPolicy

CONFIG = f"policy: {{use: auto, profile: {DEFAULT_PROFILE}}}"


@pytest.fixture(autouse=True)
def bundled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One policy for the default profile, and one for another."""
    folder = tmp_path / "bundled"
    monkeypatch.setattr(auto, "BUNDLED", folder)
    digest = read_profile(DEFAULT_PROFILE).digest
    scores = [
        Score(policy="learned", figure="reward", mean=0.5, low=0.4, high=0.6, episodes=8),
        Score(policy="learned", figure="loss_per_token", mean=0.001, low=0.0, high=0.002, episodes=8),
        Score(policy="rules:default", figure="reward", mean=0.3, low=0.2, high=0.4, episodes=8),
    ]
    for name, of in (("fitting", digest), ("foreign", "1" * 64)):
        profile = ProfileOf(digest=of, description="a profile", estimated=True)
        made = card(name=name, scores=scores, profile=profile)
        export_policy(folder / name, made, tensors_of(made.network))
    return folder


def test_it_says_what_it_took_and_refused(make_rig: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rig = make_rig(CONFIG)
    rig.run_s(3)
    status = rig.daemon.status()
    assert status["policy"] == "learned:fitting"
    assert status["policy_choice"]["bundled"] == "fitting"
    assert [one["name"] for one in status["policy_choice"]["refused"]] == ["predictor", "foreign"]
    assert rig.metric("autotune_policy", policy="learned:fitting") == 1
    assert rig.metric("autotune_bundled_policy", policy="fitting", outcome="taken") == 1
    assert rig.metric("autotune_bundled_policy", policy="foreign", outcome="profile") == 1
    lines = _choice_lines(status["policy_choice"])
    assert lines[0].startswith("auto took learned:fitting: ")
    assert lines[1].startswith("not predictor (unjudged): there is no usable verdict on this profile")
    assert lines[2].startswith("not foreign (profile): ")
    rig.write_config("policy: {use: rules}")
    rig.daemon.reload()
    rig.run_s(2)
    assert rig.daemon.status()["policy_choice"] is None
    caplog.clear()
    rig.write_config(CONFIG)
    rig.daemon.reload()
    assert rig.parts.minds.policy.policy._clock is rig.clock  # its limit on time holds after a reload
    told = [record.getMessage() for record in caplog.records]
    assert any(line.startswith("auto takes learned:fitting: ") for line in told)
    assert any(line.startswith("auto refused foreign (profile): ") for line in told)


def test_without_a_profile_rules_decide(make_rig: Any) -> None:
    rig = make_rig("policy: {use: auto}")
    rig.run_s(2)
    status = rig.daemon.status()
    assert status["policy"] == "rules:default"
    assert {one["reason"] for one in status["policy_choice"]["refused"]} == {"no-profile"}
    assert rig.metric("autotune_bundled_policy", policy="fitting", outcome="no-profile") == 1


def test_check_config_and_simulate_tell_it(tmp_path: Path) -> None:
    file = tmp_path / "daemon.yaml"
    file.write_text(CONFIG)
    answer = CliRunner().invoke(app, ["check-config", str(file)])
    assert answer.exit_code == 0
    assert "policy learned:fitting" in answer.stdout
    assert "auto refused foreign (profile)" in answer.stderr
    played = CliRunner().invoke(app, ["simulate", "chat-steady", "--policy", "auto", "--duration", "4"])
    assert played.exit_code == 0, played.output
    assert "auto takes learned:fitting" in played.stderr


def test_by_a_verdict_the_daemon_has_the_predictor_that_it_would_have_by_name(
    bundled: Path, make_rig: Any, tmp_path: Path
) -> None:
    of = ProfileOf(digest=read_profile(DEFAULT_PROFILE).digest, description="a profile", estimated=True)
    file = put(bundled, verdict(judged("rules", 0.7), judged("predictor", 0.8, loss=0.002), profile=of))
    words = f"profile: {DEFAULT_PROFILE}, quality_budget: 0.003}}\ntargets: {{ttft_s: 3, tbt_s: 0.3}}\n"
    rig = make_rig("policy: {use: auto, " + words)
    (tmp_path / "named.yaml").write_text("policy: {use: predictor, " + words)
    config = load_config(tmp_path / "named.yaml")
    taken, wanted = rig.parts.minds.policy, policy_of(config, check_rules(config))
    assert isinstance(wanted, PredictorPolicy)
    assert isinstance(taken, AutoPolicy)
    assert isinstance(taken.policy, PredictorPolicy)
    assert (taken.name, taken.policy.config, taken.policy.model.targets) == (
        wanted.name, wanted.config, wanted.model.targets,
    )  # fmt: skip
    assert taken.policy.config.quality_budget == 0.003
    rig.run_s(3)
    status = rig.daemon.status()
    assert (status["policy"], status["policy_choice"]["kind"]) == (wanted.name, "predictor")
    outcomes = [("predictor", "taken"), ("rules", "second"), ("fitting", "unjudged"), ("foreign", "profile")]
    for policy, outcome in outcomes:
        assert rig.metric("autotune_bundled_policy", policy=policy, outcome=outcome) == 1
    assert len(status["policy_choice"]["refused"]) == len(outcomes) - 1

    file.write_text("{")  # a reload looks again, and a verdict that cannot be read stops nothing
    rig.daemon.reload()
    rig.run_s(2)
    status = rig.daemon.status()
    assert status["policy"] == "learned:fitting"
    assert rig.metric("autotune_bundled_policy", policy="one.json", outcome="unreadable") == 1


def test_check_config_says_what_the_verdict_made_of_all(bundled: Path, tmp_path: Path) -> None:
    of = ProfileOf(digest=read_profile(DEFAULT_PROFILE).digest, description="a profile", estimated=True)
    put(bundled, verdict(profile=of))
    file = tmp_path / "daemon.yaml"
    file.write_text(CONFIG)
    answer = CliRunner().invoke(app, ["check-config", str(file)])
    assert answer.exit_code == 0
    assert "policy predictor:" in answer.stdout
    assert "0.800 [0.780, 0.820] of requests inside their targets, the best of those judged" in answer.stderr
    assert "auto refused rules (second): it had 0.700 [0.680, 0.720]" in answer.stderr
    assert "auto refused fitting (unjudged)" in answer.stderr
