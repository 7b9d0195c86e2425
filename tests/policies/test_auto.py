"""What ``auto`` takes of what is bundled, and why not the rest."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from policy_cards import card, observation, tensors_of

from engine.clock import ManualClock
from envs import SIMULATED_ENGINE_ID
from envs.profile import read_profile
from envs.simulated import DEFAULT_PROFILE
from policies import auto
from policies.auto import BUNDLED, choose
from policies.card import CARD_FILE, WEIGHTS_FILE, ProfileOf, Score
from policies.choice import REASONS, AutoPolicy, choice_of
from policies.export import export_policy
from policies.learned import LearnedPolicy
from policies.named import World, contender
from policies.rules import load_rules
from policies.threshold import ThresholdPolicy

DIGEST = "0" * 64  # that of the made-up card
RULES = ThresholdPolicy(load_rules("default"))


def scores(reward: float, *, rules: float = 0.3, loss: float = 0.001) -> list[Score]:
    figures = (("learned", "reward", reward), ("learned", "loss_per_token", loss), ("native", "reward", 0.1),
               ("rules:default", "reward", rules))  # fmt: skip
    return [
        Score.model_validate(
            {"policy": policy, "figure": figure, "mean": mean, "low": mean, "high": mean, "episodes": 8}
        )
        for policy, figure, mean in figures
    ]


def bundle(folder: Path, name: str, **changes: Any) -> Path:
    made = card(**{"name": name, "scores": scores(0.5), **changes})
    export_policy(folder / name, made, tensors_of(made.network))
    return folder / name


def chosen(folder: Path, digest: str | None = DIGEST) -> AutoPolicy:
    return choose(folder, RULES, profile_digest=digest, quality_budget=0.005, clock=ManualClock())


def test_with_nothing_bundled_rules_decide_and_it_is_said(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        policy = chosen(folder)
        assert (policy.policy, policy.choice.bundled, policy.choice.refused) == (RULES, None, ())
        assert list(policy.choice.lines()) == ["auto takes rules:default: no policy is bundled"]


def test_what_fits_is_taken_and_falls_back_to_the_rules(tmp_path: Path) -> None:
    bundle(tmp_path, "one")
    policy = chosen(tmp_path)
    assert isinstance(policy.policy, LearnedPolicy)
    assert policy.policy.fallback is RULES
    assert policy.name == "learned:one"
    assert policy.choice.bundled == "one"
    seen, state = observation(1), policy.initial_state()
    assert policy.decide(seen, state) == policy.policy.decide(seen, state)


def test_the_largest_gain_on_rules_wins_not_the_largest_reward(tmp_path: Path) -> None:
    bundle(tmp_path, "easy-traffic", scores=scores(0.9, rules=0.8))
    bundle(tmp_path, "hard-traffic", scores=scores(0.4, rules=0.1))
    choice = chosen(tmp_path).choice
    assert choice.bundled == "hard-traffic"
    assert [(one.name, one.reason) for one in choice.refused] == [("easy-traffic", "second")]


def break_weights(place: Path) -> None:
    (place / WEIGHTS_FILE).write_bytes((place / WEIGHTS_FILE).read_bytes()[:-1] + b"x")


class Bomb:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("unpickled"),)


def pickle_weights(place: Path) -> None:
    (place / WEIGHTS_FILE).write_bytes(pickle.dumps(Bomb()))


def break_card(place: Path) -> None:
    (place / CARD_FILE).write_text("{")


def age_card(place: Path) -> None:
    text = (place / CARD_FILE).read_text()
    (place / CARD_FILE).write_text(text.replace(SIMULATED_ENGINE_ID, "kv-autotune/SimulatedEngine-v99"))


REFUSED: dict[str, tuple[dict[str, Any], Callable[[Path], None] | None, str | None, str, str]] = {
    "broken card": ({}, break_card, DIGEST, "unreadable", "no usable card"),
    "other weights": ({}, break_weights, DIGEST, "unreadable", "sha256"),
    "pickled weights": ({}, pickle_weights, DIGEST, "unreadable", "sha256"),
    "other environment": ({}, age_card, DIGEST, "mismatch", "SimulatedEngine-v99"),
    "other profile": ({}, None, "1" * 64, "profile", "another profile"),
    "no profile": ({}, None, None, "no-profile", "no profile is loaded"),
    "no scores": ({"scores": []}, None, DIGEST, "unscored", "no held-out scores"),
    "over the budget": ({"scores": scores(0.5, loss=0.02)}, None, DIGEST, "over-budget", "2.00% per token"),
    "rules are better": ({"scores": scores(0.3)}, None, DIGEST, "no-gain", "rules earn as much"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_with_its_reason(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    changes, spoil, digest, reason, words = REFUSED[name]
    place = bundle(tmp_path / "bundled", "one", **changes)
    if spoil is not None:
        spoil(place)
    choice = chosen(tmp_path / "bundled", digest).choice
    assert choice.bundled is None
    assert choice.why == "none of 1 bundled policies fits"
    (refused,) = choice.refused
    assert refused.reason == reason
    assert refused.reason in REASONS
    assert words in refused.why
    assert all("\n" not in line for line in choice.lines())
    assert not (tmp_path / "unpickled").exists()


def test_the_next_best_is_taken_where_the_best_is_broken(tmp_path: Path) -> None:
    break_weights(bundle(tmp_path, "best", scores=scores(0.9)))
    bundle(tmp_path, "good")
    choice = chosen(tmp_path).choice
    assert choice.bundled == "good"
    assert [(one.name, one.reason) for one in choice.refused] == [("best", "unreadable")]


def test_by_name_it_takes_what_fits_the_worlds_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "BUNDLED", tmp_path)
    profile = read_profile(DEFAULT_PROFILE)
    bundle(tmp_path, "mine", profile=ProfileOf(digest=profile.digest, description="this one", estimated=True))
    taken, without = contender("auto", World(profile)), contender("auto")
    assert (taken.name, choice_of(taken.policy).bundled) == ("auto", "mine")  # type: ignore[union-attr]
    assert choice_of(without.policy).bundled is None  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="auto"):
        contender("auto:x")


def test_what_comes_with_the_program_can_be_read() -> None:
    """Whatever is bundled: nothing broken, nothing for another version of the environment."""
    choice = choose(BUNDLED, RULES, profile_digest=None, quality_budget=0.005).choice
    assert [one for one in choice.refused if one.reason != "no-profile"] == []
