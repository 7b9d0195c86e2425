"""The linter against rules that are wrong in a known way, and the region solver against brute force."""

from __future__ import annotations

import random

import pytest

from engine.tunables import TUNABLES
from envs.features import FEATURES
from envs.spaces import Observation
from policies.expressions import parse_condition
from policies.lint import lint
from policies.regions import Span, where
from policies.rules import load_rules, parse_rules


def found(rules: str, otherwise: str = "{kv_format: native, eviction: none, block_size: 32}") -> dict[str, list[str]]:
    findings = lint(parse_rules(f"version: 1\nname: t\notherwise: {otherwise}\nrules:\n{rules}"))
    kinds: dict[str, list[str]] = {}
    for finding in findings:
        kinds.setdefault(finding.kind, []).append(finding.rules[0])
    return kinds


def rule(name: str, when: str, sets: str = "{kv_format: int8}", **more: object) -> str:
    extra = "".join(f", {key.replace('x_', '')}: {value}" for key, value in more.items())
    return f"  - {{name: {name}, when: '{when}', set: {sets}{extra}}}\n"


CALM = {"release": "'kv_demand < 0.2'", "release_for": "30s"}


def test_the_default_preset_is_clean() -> None:
    assert lint(load_rules("default")) == []


def test_the_literature_preset_flaps_and_undoes_itself() -> None:
    findings = lint(load_rules("literature"))
    kinds = [finding.kind for finding in findings]
    assert kinds.count("flapping") == 3
    assert [f.rules for f in findings if f.kind == "pair"] == [
        ("load-high", "load-between"),
        ("load-between", "load-low"),
    ]
    assert [f.rules[0] for f in findings if f.kind == "self-undoing"] == ["load-high", "load-between"]


@pytest.mark.parametrize(
    "when",
    [
        "load > 1.5",
        "load > 0.8 and load < 0.3",
        "load > 0.8 and load <= 0.8",
        "kv_demand < 0.2 and min(kv_demand, 5) > 0.4",
        'kv_format == "int4" and rank(kv_format) < 2',
        'kv_format in ["int8"] and kv_format in ["int4"]',
        "not (load >= 0)",
        "waiting < 0",
    ],
)
def test_conditions_that_never_hold(when: str) -> None:
    assert found(rule("r", when, **CALM)) == {"unreachable": ["r"]}


@pytest.mark.parametrize("when", ["load > 0.99", "load > 0.8 or load < 0.3", "waiting > running", "known(load)"])
def test_conditions_that_may_hold_are_not_called_unreachable(when: str) -> None:
    assert "unreachable" not in found(rule("r", when, **CALM))


def test_a_rule_behind_a_wider_and_more_important_one_is_shadowed() -> None:
    wide = rule("wide", "kv_demand > 0.5", priority=5, release="'kv_demand < 0.2'")
    narrow = rule("narrow", "kv_demand > 0.7", "{kv_format: int4}", release="'kv_demand < 0.6'")
    assert found(wide + narrow)["shadowed"] == ["narrow"]
    # It sets another knob as well, lets go later, or is quicker: then it has its say.
    assert "shadowed" not in found(wide + narrow.replace("{kv_format: int4}", "{kv_format: int4, block_size: 64}"))
    assert "shadowed" not in found(wide + narrow.replace("kv_demand < 0.6", "kv_demand < 0.3"))
    assert "shadowed" not in found(wide.replace("set:", "for: 10s, set:") + narrow)


def test_two_rules_together_shadow_a_third() -> None:
    rules = (
        rule("low", "kv_demand < 0.6", priority=5, release="'kv_demand > 0.7'")
        + rule("high", "kv_demand >= 0.6", "{kv_format: int4}", priority=5, release="'kv_demand < 0.5'")
        + rule("middle", "kv_demand > 0.5", "{kv_format: k8v4}", release="'kv_demand < 0.4'")
    )
    assert found(rules)["shadowed"] == ["middle"]


def test_a_release_that_never_comes() -> None:
    assert found(rule("r", "kv_demand > 0.5", release="'kv_demand < 0'"))["stuck"] == ["r"]


def test_a_knob_without_a_place_to_go_back_to_is_a_gap() -> None:
    only = rule("r", "kv_demand > 0.6", **CALM)
    assert found(only, "{}")["gap"] == ["r"]
    assert "gap" not in found(only)
    # Two rules whose bands of hysteresis meet leave no gap; 0.4 to 0.5 belongs to whichever was active last.
    high = rule("high", "kv_demand > 0.5", release="'kv_demand < 0.4'")
    assert "gap" not in found(
        high + rule("low", "kv_demand < 0.4", "{kv_format: native}", release="'kv_demand > 0.5'"), "{}"
    )
    assert "gap" in found(
        high + rule("low", "kv_demand < 0.3", "{kv_format: native}", release="'kv_demand > 0.35'"), "{}"
    )


def test_zero_width_flaps_unless_it_waits() -> None:
    assert found(rule("r", "kv_demand > 0.6"))["flapping"] == ["r"]
    assert found(rule("r", "kv_demand > 0.6", release="'kv_demand <= 0.6'"))["flapping"] == ["r"]
    assert "flapping" not in found(rule("r", "kv_demand > 0.6", release="'kv_demand < 0.5'"))
    assert "flapping" not in found(rule("r", "kv_demand > 0.6", x_for="2s", release_for="5s"))


def test_a_figure_that_its_own_action_lowers() -> None:
    assert found(rule("r", "kv_usage > 0.8", release="'kv_usage < 0.5'"))["self-undoing"] == ["r"]
    # Int8 leaves a good half: what lets go below that does not see its own doing.
    assert "self-undoing" not in found(rule("r", "kv_usage > 0.8", release="'kv_usage < 0.4'"))
    assert "self-undoing" not in found(rule("r", "kv_demand > 0.8", release="'kv_demand < 0.5'"))


def test_every_point_where_a_condition_holds_lies_in_a_box() -> None:
    """Against the rules' own evaluator, at random points near the thresholds."""
    rng = random.Random(0)
    atoms = [
        "load > 0.5", "kv_demand <= 1", "waiting == 0", "0.2 <= load < 0.7", "max(load, kv_demand) > 0.8",
        "kv_demand * 2 - load > 0.5", "rank(kv_format) >= 1", 'eviction != "none"', "block_size < 64",
        "block_size in [16, 128]", "abs(load - 0.5) < 0.2", "running / 10 > load",
    ]  # fmt: skip
    holding = 0
    for _ in range(120):
        parts = [rng.choice(["", "not "]) + f"({rng.choice(atoms)})" for _ in range(3)]
        text = f"{parts[0]} {rng.choice(['and', 'or'])} {parts[1]} {rng.choice(['and', 'or'])} {parts[2]}"
        condition = parse_condition(text)
        boxes = {holds: where(text, holds=holds) for holds in (True, False)}
        for _ in range(25):
            values: dict[str, float | None] = {feature.name: feature.low for feature in FEATURES}
            values |= {name: rng.choice([0, 0.2, 0.5, 0.7, 0.8, 1, rng.random()]) for name in ("load", "kv_demand")}
            values |= {"waiting": rng.choice([0, 1, 9]), "running": rng.choice([0, 5, 50])}
            knobs = {name: rng.choice(knob.values) for name, knob in TUNABLES.items()}
            truth = condition.evaluate(Observation(0, values, knobs))
            if truth is None:
                continue
            holding += truth is True
            point = {**values, **knobs}
            assert any(_holds(box, point) for box in boxes[truth is True]), text
    assert holding > 500


def _holds(box: dict, point: dict) -> bool:  # type: ignore[type-arg]
    for name, domain in box.items():
        value = point[name]
        if isinstance(domain, Span):
            if domain.meet(Span(float(value), float(value))).is_empty:
                return False
        elif value not in domain:
            return False
    return True
