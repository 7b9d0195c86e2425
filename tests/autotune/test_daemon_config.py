"""The configuration file: every fault by its path, and what a reload takes from a new one."""

from __future__ import annotations

from pathlib import Path

import pytest
from policy_cards import advised_card, card, tensors_of

from autotune.config import Config, ConfigError, load_config, parse_config
from autotune.reload import plan_reload
from autotune.wiring import check_rules, guard_of, policy_of
from engine.clock import ManualClock
from envs.profile import read_profile
from envs.simulated import DEFAULT_PROFILE
from policies.card import ProfileOf
from policies.export import export_policy
from policies.learned import LearnedPolicy
from policies.predictor import PredictorPolicy

EXAMPLE = Path(__file__).parents[2] / "systemd" / "autotune.yaml"


def problems(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_config(text)
    return caught.value.problems


def paths(text: str) -> set[str]:
    return {line.partition(": ")[0] for line in problems(text)}


def test_an_empty_file_is_the_defaults() -> None:
    assert parse_config("") == Config()
    assert parse_config("guard:\nengine: {}\n") == Config()


def test_the_shipped_example_names_every_default() -> None:
    example = load_config(EXAMPLE)
    assert example == Config()
    text = EXAMPLE.read_text()
    for section in ("engine", "targets", "policy", "guard", "restart", "journal", "admin", "housekeeping"):
        for key in type(getattr(example, section)).model_fields:
            assert f"{key}:" in text, f"{section}.{key} is not in the example"


def test_all_faults_are_told_each_by_its_path() -> None:
    text = """
mode: sometimes
surprise: 1
engine: {poll: 3}
targets: {ttft_s: -1, quantile: .nan}
guard: {rates: {step: {changes: many}}, allowed: {kv_format: [native, fp8], nosuch: []}}
"""
    assert paths(text) == {
        "mode",
        "surprise",
        "engine.poll",
        "targets.ttft_s",
        "targets.quantile",
        "guard.rates.step.changes",
        "guard.allowed.kv_format",
        "guard.allowed.nosuch",
    }
    unknown = next(line for line in problems(text) if line.startswith("engine.poll"))
    assert "poll_s" in unknown
    assert all("\n" not in line for line in problems(text))


@pytest.mark.parametrize(
    "text", ["mode: 2026-13-45", "tick_s: " + "9" * 5000, 'tick_s: !!int ""', "tick_s: !!timestamp x", "a: [1"]
)
def test_values_that_yaml_itself_cannot_take_are_one_fault(text: str) -> None:
    (line,) = problems(text)
    assert line.startswith("not valid YAML")
    assert "\n" not in line


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("window_s: 0.2\ntick_s: 1", "window_s"),
        ("long_window_s: 1", "long_window_s"),
        ("engine: {poll_s: 5, stale_after_s: 1}\nwindow_s: 20", "engine.stale_after_s"),
        ("guard: 3", "guard"),
        ("admin: {port: 70000}", "admin.port"),
        ("guard: {knob_dwell_s: {block_size: -1}}", "guard.knob_dwell_s.block_size"),
    ],
)
def test_bounds_and_consistency(text: str, path: Path) -> None:
    assert paths(text) == {path}


@pytest.mark.parametrize("text", ["{", "a: 1\na: 2", "- 1", "just words", "? [1]\n: 2", "x: !!python/name:os.system"])
def test_what_is_not_usable_yaml_is_one_line(text: str) -> None:
    (line,) = problems(text)
    assert "\n" not in line


def test_a_twice_given_key_is_refused_with_its_line() -> None:
    assert problems("mode: off\ntick_s: 1\nmode: active\n") == [
        "not valid YAML at line 3, column 1: key 'mode' is given twice"
    ]


def test_off_is_a_word() -> None:
    assert parse_config("mode: off").mode == "off"


def test_values_of_knobs_take_their_declared_type() -> None:
    assert parse_config("guard: {allowed: {block_size: ['32', 64]}}").guard.allowed == {"block_size": (32, 64)}


def test_missing_and_unreadable_files_are_one_line(tmp_path: Path) -> None:
    for path, content in ((tmp_path / "none.yaml", None), (tmp_path / "latin.yaml", b"\xff\xfe"), (tmp_path, None)):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        assert str(path) in caught.value.problems[0]


def test_a_reload_sorts_changes_and_keeps_what_needs_a_restart() -> None:
    running = parse_config("engine: {control: /run/a.sock}\n")
    wanted = parse_config("mode: advise\nengine: {control: /run/b.sock, poll_s: 1}\nadmin: {port: 1}\n")
    plan = plan_reload(running, wanted)
    assert plan.applied == ["mode", "engine.poll_s"]
    assert plan.needs_restart == ["engine.control", "admin.port"]
    assert plan.rejected == []
    assert plan.config.mode == "advise"
    assert plan.config.engine.control == Path("/run/a.sock")
    assert plan.config.admin.port == Config().admin.port
    assert plan.summary() == "reload: applied mode, engine.poll_s; needs restart engine.control, admin.port"
    again = plan_reload(plan.config, wanted)
    assert again.applied == []
    assert again.needs_restart == ["engine.control", "admin.port"]


def test_the_predictor_needs_a_profile_that_can_be_read(tmp_path: Path) -> None:
    assert paths("policy: {use: predictor}") == {"policy.profile"}
    assert paths("policy: {use: oracle}") == {"policy.use"}
    assert paths("policy: {quality_budget: -1}") == {"policy.quality_budget"}
    for content in (None, "kind: other", "[" * 3):
        place = tmp_path / "profile.yaml"
        if content is not None:
            place.write_text(content)
        config = parse_config(f"policy: {{use: predictor, profile: {place}}}")
        with pytest.raises(ConfigError) as caught:
            policy_of(config, check_rules(config))
        (line,) = caught.value.problems
        assert line.startswith("policy.profile: ")
        assert str(place) in line
    good = parse_config(f"policy: {{use: predictor, profile: {DEFAULT_PROFILE}}}\ntargets: {{ttft_s: 3}}")
    policy = policy_of(good, check_rules(good))
    assert isinstance(policy, PredictorPolicy)
    assert policy.model.targets.ttft_s == 3
    unbounded = parse_config(f"policy: {{use: predictor, profile: {DEFAULT_PROFILE}, quality_budget: null}}")
    assert policy_of(unbounded, check_rules(unbounded)).config.quality_budget == 1.0
    assert guard_of(unbounded).quality is None
    assert guard_of(Config()).quality is not None
    assert policy_of(Config(), check_rules(Config())).name == "rules:default"


def test_a_learned_policy_is_read_and_refused_in_one_line(tmp_path: Path) -> None:
    assert paths("policy: {use: learned}") == {"policy.learned"}
    folder = tmp_path / "policy"
    config = parse_config(f"policy: {{use: learned, learned: {folder}}}")
    with pytest.raises(ConfigError) as caught:
        policy_of(config, check_rules(config))
    (line,) = caught.value.problems
    assert line.startswith("policy.learned: ")
    made = card()
    export_policy(folder, made, tensors_of(made.network))
    policy = policy_of(config, check_rules(config), ManualClock())
    assert isinstance(policy, LearnedPolicy)
    assert policy.fallback.name == "rules:default"
    other = parse_config(f"policy: {{use: learned, learned: {folder}, profile: {DEFAULT_PROFILE}}}")
    with pytest.raises(ConfigError, match=r"policy\.learned: .*profile"):
        policy_of(other, check_rules(other))


def test_a_learned_policy_that_overrules_the_predictor_needs_the_profile(tmp_path: Path) -> None:
    made = advised_card(
        advisor="predictor",
        profile=ProfileOf(digest=read_profile(DEFAULT_PROFILE).digest, description="L4", estimated=True),
    )
    export_policy(tmp_path / "policy", made, tensors_of(made.network))
    text = f"policy: {{use: learned, learned: {tmp_path / 'policy'}"
    with_profile = parse_config(f"{text}, profile: {DEFAULT_PROFILE}}}\ntargets: {{ttft_s: 3}}")
    policy = policy_of(with_profile, check_rules(with_profile), ManualClock())
    assert isinstance(policy, LearnedPolicy)
    assert isinstance(policy.fallback, PredictorPolicy)
    assert policy.fallback.model.targets.ttft_s == 3
    without = parse_config(text + "}")
    with pytest.raises(ConfigError, match=r"policy\.learned: .*predictor: .*profile"):
        policy_of(without, check_rules(without))


def test_a_problem_is_one_line_whatever_the_file_quotes() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config('{"a\\nb": 1, "mode": "' + "x" * 5000 + '"}')
    assert len(caught.value.problems) == 2
    assert all("\n" not in problem and len(problem) <= 1000 for problem in caught.value.problems)
