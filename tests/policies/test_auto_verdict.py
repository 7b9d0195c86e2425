"""What ``auto`` takes where an evaluation has judged the loaded profile, and why not the rest."""

from __future__ import annotations

import fnmatch
import json
import os
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from policy_cards import card, tensors_of
from verdict_files import BUDGET, DIGEST, attained, judged, put, verdict

import envs
from engine.clock import ManualClock
from envs.profile import read_profile
from envs.signals import Targets
from envs.simulated import DEFAULT_PROFILE
from policies import auto
from policies.auto import BUNDLED, choose
from policies.card import CARD_FILE, WEIGHTS_FILE, PolicyFileError, ProfileOf, Score, read_card
from policies.choice import REASONS, AutoPolicy, choice_of
from policies.export import export_policy
from policies.learned import LearnedPolicy
from policies.named import World, contender
from policies.predictor import PredictorPolicy
from policies.predictor_of import predictor_of
from policies.profile_verdict import MAX_VERDICT_BYTES, VERDICTS, ProfileVerdict, objection, read_verdict, verdict_files
from policies.rules import load_rules, parse_rules, preset_text
from policies.threshold import ThresholdPolicy

PROFILE = read_profile(DEFAULT_PROFILE)
RULES = ThresholdPolicy(load_rules("default"))
PREDICTOR = predictor_of(PROFILE, Targets())


def bundle(folder: Path, name: str, **changes: Any) -> str:
    """A learned policy, whose card has no scores to go by; the sha256 of its weights."""
    made = card(**{"name": name, "scores": [], **changes})
    export_policy(folder / name, made, tensors_of(made.network))
    return read_card(folder / name).sha256


def chosen(folder: Path, digest: str | None = DIGEST, **changes: Any) -> AutoPolicy:
    usual: dict[str, Any] = {"quality_budget": BUDGET, "clock": ManualClock(), "predictor": lambda: PREDICTOR}
    return choose(folder, usual.pop("rules", RULES), profile_digest=digest, **{**usual, **changes})


def refused(policy: AutoPolicy) -> list[tuple[str, str]]:
    assert all(one.reason in REASONS for one in policy.choice.refused)
    assert not any("\n" in line for line in policy.choice.lines())
    return [(one.name, one.reason) for one in policy.choice.refused]


def test_the_best_judged_policy_is_taken_whatever_its_kind(tmp_path: Path) -> None:
    sha = bundle(tmp_path, "taught")
    figures = {"rules": 0.7, "predictor": 0.75, "learned": 0.72}
    for best, policy in (("rules", RULES), ("predictor", PREDICTOR), ("learned", None)):
        now = {**figures, best: 0.9}
        put(tmp_path, verdict(judged("rules", now["rules"]), judged("predictor", now["predictor"]),
                              judged("learned", now["learned"], name="taught", sha256=sha)))  # fmt: skip
        found = chosen(tmp_path)
        assert found.choice.kind == best
        assert found.choice.bundled == ("taught" if best == "learned" else None)
        assert found.choice.outcomes()[0] == ("taught" if best == "learned" else best, "taken")
        assert "0.900 [0.880, 0.920]" in found.choice.why
        assert "2 workloads, 10 seeds of 600 s, estimated profile, 2026-12-01; native 0.600" in found.choice.why
        assert {reason for _, reason in refused(found)} == {"second"}
        assert len(refused(found)) == 2
        if policy is None:
            assert isinstance(found.policy, LearnedPolicy)
            assert found.policy.fallback is RULES
        else:
            assert found.policy is policy


def test_what_is_over_the_daemons_own_budget_is_left_out(tmp_path: Path) -> None:
    put(tmp_path, verdict(judged("rules", 0.7, loss=0.001), judged("predictor", 0.9, loss=0.004)))
    assert chosen(tmp_path).choice.kind == "predictor"
    strict = chosen(tmp_path, quality_budget=0.002)
    assert strict.policy is RULES
    assert refused(strict) == [("predictor", "over-budget")]
    assert "0.40% per token at worst, the budget is 0.20%" in strict.choice.refused[0].why
    put(tmp_path, verdict(judged("rules", 0.7), judged("predictor", 0.9, loss=0.05)))
    assert refused(chosen(tmp_path)) == [("predictor", "over-budget")]
    assert chosen(tmp_path, quality_budget=0.1).policy is PREDICTOR  # who allows more may have it
    nobody = chosen(tmp_path, quality_budget=0.0)
    assert nobody.policy is RULES  # they are always there
    assert refused(nobody) == [("predictor", "over-budget")]
    assert "none of 2 policies judged" in nobody.choice.why
    assert "rules: it lost 0.10% per token" in nobody.choice.why


def swap_weights(place: Path) -> None:
    """Others, and the card knows: they are as they should be, and nobody has judged them."""
    made = read_card(place)
    export_policy(place, made, tensors_of(made.network, seed=1))


def break_weights(place: Path) -> None:
    (place / WEIGHTS_FILE).write_bytes((place / WEIGHTS_FILE).read_bytes()[:-1] + b"x")


def rename(place: Path) -> None:
    made = read_card(place)
    export_policy(place, made.model_copy(update={"name": "somebody-else"}), tensors_of(made.network))


def remove(place: Path) -> None:
    (place / CARD_FILE).unlink()


UNUSABLE: dict[str, tuple[Callable[[Path], None], list[tuple[str, str]]]] = {
    "other weights": (swap_weights, [("taught", "unjudged"), ("taught", "missing")]),
    "broken weights": (break_weights, [("taught", "unreadable")]),
    "other name": (rename, [("taught", "unjudged"), ("taught", "missing")]),
    "gone": (remove, [("taught", "missing")]),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_where_the_best_cannot_be_used_the_next_best_is_taken(name: str, tmp_path: Path) -> None:
    spoil, expected = UNUSABLE[name]
    sha = bundle(tmp_path, "taught")
    put(tmp_path, verdict(judged("rules", 0.6), judged("predictor", 0.8),
                          judged("learned", 0.9, name="taught", sha256=sha)))  # fmt: skip
    assert chosen(tmp_path).choice.bundled == "taught"
    spoil(tmp_path / "taught")
    found = chosen(tmp_path)
    assert found.policy is PREDICTOR
    assert refused(found) == [*expected, ("rules", "second")]


def test_a_predictor_that_cannot_be_made_leaves_the_next_best(tmp_path: Path) -> None:
    def cannot() -> Any:
        raise ValueError("a pool that is\ntoo small")

    put(tmp_path, verdict())
    found = chosen(tmp_path, predictor=cannot)
    assert (found.policy, refused(found)) == (RULES, [("predictor", "unbuildable")])
    assert found.choice.refused[0].why == "a pool that is too small"
    assert refused(chosen(tmp_path, predictor=None)) == [("predictor", "unbuildable")]


def test_what_is_bundled_and_was_not_judged_waits_for_a_verdict(tmp_path: Path) -> None:
    """Even if its own card is better than rules: it was not compared with what is taken."""
    scores = [
        Score(policy="learned", figure="reward", mean=0.9, low=0.8, high=1.0, episodes=8),
        Score(policy="learned", figure="loss_per_token", mean=0.0, low=0.0, high=0.0, episodes=8),
        Score(policy="rules:default", figure="reward", mean=0.1, low=0.0, high=0.2, episodes=8),
    ]
    bundle(tmp_path, "late", scores=scores)
    bundle(tmp_path, "foreign", profile=ProfileOf(digest="1" * 64, description="another", estimated=True))
    assert chosen(tmp_path).choice.bundled == "late"
    put(tmp_path, verdict(judged("predictor", 0.8)))
    found = chosen(tmp_path)
    assert found.policy is PREDICTOR
    assert refused(found) == [("foreign", "profile"), ("late", "unjudged"), ("rules", "unjudged")]


def test_equals_go_to_the_simpler(tmp_path: Path) -> None:
    sha = bundle(tmp_path, "taught")
    learned = judged("learned", 0.80049, name="taught", sha256=sha)
    put(tmp_path, verdict(learned, judged("predictor", 0.8001), judged("rules", 0.79951)))
    found = chosen(tmp_path)
    assert found.policy is RULES
    assert refused(found) == [("predictor", "second"), ("taught", "second")]
    assert "and that one is simpler" in found.choice.refused[0].why
    put(tmp_path, verdict(learned, judged("predictor", 0.8001), judged("rules", 0.79949)))
    assert chosen(tmp_path).policy is PREDICTOR


def test_rules_of_ones_own_stand_where_the_default_ones_were_judged(tmp_path: Path) -> None:
    put(tmp_path, verdict(judged("rules", 0.9), judged("predictor", 0.8)))
    assert "in whose place" not in chosen(tmp_path).choice.why
    changed = preset_text("default").replace("dwell: 3s", "dwell: 4s")  # and still of the same name
    for text in (changed, preset_text("literature")):
        own = ThresholdPolicy(parse_rules(text))
        found = choose(tmp_path, own, profile_digest=DIGEST, quality_budget=BUDGET, predictor=lambda: PREDICTOR)
        assert found.policy is own
        assert "judged were the rules default, in whose place these are" in found.choice.why


def test_the_same_files_give_the_same_choice(tmp_path: Path) -> None:
    shas = [(name, bundle(tmp_path, name)) for name in ("b", "a")]
    same = [judged("learned", 0.9, name=name, sha256=sha) for name, sha in shas]
    choices = []
    for order in (same, same[::-1]):
        put(tmp_path, verdict(*order, judged("rules", 0.9), judged("predictor", 0.9, loss=0.5)))
        choices += [chosen(tmp_path).choice, chosen(tmp_path).choice]
    assert len(set(choices)) == 1
    put(tmp_path, verdict(*same))
    assert chosen(tmp_path).choice.bundled == "a"


def damage(**changes: Any) -> Callable[[Path], None]:
    def write(file: Path) -> None:
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return write


def twice(file: Path) -> None:
    document = json.loads(file.read_text())
    damage(candidates=[*document["candidates"], document["candidates"][0]])(file)


def one(**changes: Any) -> Callable[[Path], None]:
    def write(file: Path) -> None:
        document = json.loads(file.read_text())
        damage(candidates=[document["candidates"][0] | changes])(file)

    return write


DAMAGED: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "no JSON": (lambda file: file.write_text("{") and None, "unreadable", "no usable verdict"),
    "a list": (lambda file: file.write_text("[]") and None, "unreadable", "no usable verdict"),
    "not text": (lambda file: file.write_bytes(b"\xff\xfe") and None, "unreadable", "no usable verdict"),
    "nested": (lambda file: file.write_text("[" * 10**4) and None, "unreadable", "no usable verdict"),
    "too large": (lambda file: file.write_text(" " * (MAX_VERDICT_BYTES + 1)) and None, "unreadable", "larger than"),
    "more keys": (damage(more=1), "unreadable", "more"),
    "another version": (damage(version=2), "unreadable", "version"),
    "no candidates": (damage(candidates=[]), "unreadable", "candidates"),
    "a share of 2": (damage(native={"value": 2.0, "low": 0.1, "high": 0.2}), "unreadable", "native.value"),
    "an odd interval": (damage(native={"value": 0.1, "low": 0.3, "high": 0.2}), "unreadable", "down to"),
    "text for a number": (damage(seeds="10"), "unreadable", "seeds"),
    "a candidate twice": (twice, "unreadable", "there twice"),
    "other rules": (one(name="mine"), "unreadable", "no candidate"),
    "no number": (one(worst_loss=float("nan")), "unreadable", "worst_loss"),
    "rules with weights": (one(sha256="0" * 64), "unreadable", "sha256"),
    "learned without": (one(kind="learned", name="x"), "unreadable", "sha256"),
    "not what it lost": (one(inside_budget=False), "unreadable", "not outside"),
    "auto": (one(kind="auto", name="auto"), "unreadable", "kind"),
    "of another environment": (damage(environment="kv-autotune/SimulatedEngine-v99"), "mismatch", "v99"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_verdict_is_refused_and_all_is_as_without_one(name: str, tmp_path: Path) -> None:
    spoil, reason, words = DAMAGED[name]
    file = put(tmp_path, verdict())
    spoil(file)
    found = chosen(tmp_path)
    assert found.policy is RULES
    assert found.choice.why == "no policy is bundled"
    assert refused(found) == [("one.json", reason), ("predictor", "unjudged")]
    assert words in found.choice.refused[0].why
    put(tmp_path, verdict(), "two.json")
    beside = chosen(tmp_path)  # one that can be read is not held up by it
    assert beside.policy is PREDICTOR
    assert refused(beside) == [("one.json", reason), ("rules", "second")]


def test_a_verdict_that_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "verdicts" / "one.json").mkdir(parents=True)
    assert refused(chosen(tmp_path))[0] == ("one.json", "unreadable")
    with pytest.raises(PolicyFileError, match="No such file"):
        read_verdict(tmp_path / "none.json")


def fifo(bundled: Path) -> None:
    os.mkfifo(bundled / VERDICTS / "a.json")


def socket_file(bundled: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(bundled / VERDICTS / "a.json"))


def endless(bundled: Path) -> None:
    (bundled / VERDICTS / "a.json").symlink_to("/dev/zero")


def itself(bundled: Path) -> None:
    (bundled / VERDICTS / "a.json").symlink_to("a.json")


def named(name: bytes) -> Callable[[Path], None]:
    def write(bundled: Path) -> None:
        put(bundled, verdict(judged("rules", 0.99)), os.fsdecode(name))

    return write


ODD: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "a pipe": (fifo, "a.json", "no plain file"),
    "a socket": (socket_file, "a.json", "No such device"),
    "a device": (endless, "a.json", "no plain file"),
    "a link to itself": (itself, "a.json", "symbolic links"),
    "bytes": (named(b"a\xff\xfe.json"), "a\\udcff\\udcfe.json", "no printable text"),
    "two lines": (named(b"a\nb.json"), "a b.json", "no printable text"),
    "an escape": (named(b"a\x1b[31m.json"), "a\\x1b[31m.json", "no printable text"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ODD)
def test_odd_entries_beside_a_verdict_are_refused_and_nothing_waits_for_them(name: str, tmp_path: Path) -> None:
    make, shown, words = ODD[name]
    put(tmp_path, verdict())
    make(tmp_path)
    found = chosen(tmp_path)
    assert found.policy is PREDICTOR
    assert refused(found) == [(shown, "unreadable"), ("rules", "second")]
    assert words in found.choice.refused[0].why
    told = json.dumps(found.choice.to_json(), ensure_ascii=False) + "".join(found.choice.lines())
    assert told.encode().decode().isprintable()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("with_verdict", [False, True])
def test_odd_folders_of_policies_are_refused_as_well(with_verdict: bool, tmp_path: Path) -> None:
    sha = bundle(tmp_path, "taught")
    (tmp_path / "taught").rename(tmp_path / os.fsdecode(b"\xff"))
    (tmp_path / "piped").mkdir()
    os.mkfifo(tmp_path / "piped" / CARD_FILE)
    bundle(tmp_path, "weights")
    (tmp_path / "weights" / WEIGHTS_FILE).unlink()
    os.mkfifo(tmp_path / "weights" / WEIGHTS_FILE)
    if with_verdict:
        of_pipe = read_card(tmp_path / "weights").sha256
        learned = [
            judged("learned", 0.9, name=name, sha256=one) for name, one in (("taught", sha), ("weights", of_pipe))
        ]
        put(tmp_path, verdict(*learned, judged("rules", 0.6)))
    found = chosen(tmp_path)
    assert found.policy is RULES
    reasons = dict(refused(found))
    assert reasons["piped"] == reasons["\\udcff"] == "unreadable"
    assert reasons["weights"] == ("unreadable" if with_verdict else "unscored")


def test_of_two_verdicts_on_one_profile_neither_counts(tmp_path: Path) -> None:
    put(tmp_path, verdict(), "a.json")
    put(tmp_path, verdict(judged("rules", 0.9)), "b.json")
    found = chosen(tmp_path)
    assert found.policy is RULES
    assert refused(found) == [("a.json", "ambiguous"), ("b.json", "ambiguous"), ("predictor", "unjudged")]
    assert "a.json, b.json" in found.choice.refused[0].why


def test_verdicts_on_other_profiles_are_passed_over(tmp_path: Path) -> None:
    put(tmp_path, verdict(profile=ProfileOf(digest="1" * 64, description="another", estimated=True)))
    for digest, reason in ((DIGEST, "unjudged"), (None, "no-profile")):
        found = chosen(tmp_path, digest)
        assert (found.policy, refused(found)) == (RULES, [("predictor", reason)])


def test_what_was_measured_with_other_memory_or_lengths_is_taken_with_a_word_of_it(tmp_path: Path) -> None:
    put(tmp_path, verdict(pool_bytes=64 << 20, length_scale=4.0))
    assert "estimated profile, a pool of 64.0 MiB, lengths divided by 4, 2026-12-01" in chosen(tmp_path).choice.why


def test_by_name_it_goes_by_the_verdict_on_the_worlds_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "BUNDLED", tmp_path)
    of = ProfileOf(digest=PROFILE.digest, description="this one", estimated=True)
    put(tmp_path, verdict(judged("rules", 0.7), judged("predictor", 0.8, loss=0.004), profile=of))
    targets = Targets(3.0, 0.3)
    taken = contender("auto", World(PROFILE, targets)).policy
    assert isinstance(taken, AutoPolicy)
    assert isinstance(taken.policy, PredictorPolicy)
    assert taken.policy.model.targets == targets
    less = choice_of(contender("auto", World(PROFILE, targets, quality_budget=0.002)).policy)
    assert less is not None
    assert less.kind == "rules"


def test_importing_it_imports_neither_torch_nor_the_predictor() -> None:
    """Who imports ``auto`` has only what reads verdicts and cards."""
    code = "import sys, policies.auto; print([m for m in ('torch', 'policies.predictor', 'ray') if m in sys.modules])"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


def test_verdicts_that_come_with_the_program_can_be_used_and_are_packaged() -> None:
    root = Path(__file__).parents[2]
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["policies"]
    assert any(fnmatch.fnmatch("bundled/verdicts/one.json", pattern) for pattern in patterns)
    found: list[ProfileVerdict] = [read_verdict(file) for file in verdict_files(BUNDLED / "verdicts")]
    assert [objection(one) for one in found] == [None] * len(found)
    digests = [one.profile.digest for one in found]
    assert len(digests) == len(set(digests))


def test_a_metric_gets_every_pair_once(tmp_path: Path) -> None:
    weights = [judged("learned", value, name="lost", sha256=letter * 64) for value, letter in ((0.9, "a"), (0.8, "b"))]
    put(tmp_path, verdict(*weights, judged("rules", 0.7), native=attained(0.5)))
    found = chosen(tmp_path, predictor=None)
    assert refused(found) == [("lost", "missing"), ("lost", "missing")]
    assert found.choice.outcomes() == [("rules", "taken"), ("lost", "missing")]


def test_the_verdicts_that_ship_are_on_profiles_that_ship() -> None:
    digests = {read_profile(path).digest for path in (Path(envs.__file__).parent / "profiles").glob("*.yaml")}
    files = verdict_files(BUNDLED / VERDICTS)
    assert files
    for file in files:
        found = read_verdict(file)
        assert objection(found) is None
        assert found.profile.digest in digests
        assert {one.kind for one in found.candidates} >= {"rules", "predictor"}
        assert all(one.inside_budget for one in found.candidates)
        assert found.seeds >= 10


def test_auto_on_the_default_profile_is_the_predictor() -> None:
    chosen = contender("auto", World(read_profile(DEFAULT_PROFILE))).policy
    assert isinstance(chosen, AutoPolicy)
    assert chosen.choice.taken.startswith("predictor")
