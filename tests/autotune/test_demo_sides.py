"""What replays are run under, how they compare, and what the simulator says of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from autotune.config import parse_config
from autotune.demo import bundled
from autotune.demo.bundled import bundled_model, bundled_profile
from autotune.demo.foretell import Foretold, foretell
from autotune.demo.report import Arm
from autotune.demo.sides import DEFAULT_SIDES, NATIVE, side, sides
from autotune.demo.sides_view import order_agreement, side_figures, sides_table
from autotune.demo.watch import Seen
from autotune.replay.summary import Targets, summarise
from envs.profile import read_profile
from envs.signals import Targets as SimulatedTargets
from envs.simulated import DEFAULT_PROFILE
from envs.workload.trace import TraceRequest, from_requests


def test_names_are_those_of_simulations(tmp_path: Path) -> None:
    assert sides(("default", NATIVE), None, None) == DEFAULT_SIDES
    static = side("static:kv_format=int4,block_size=64", None, None)
    assert static.engine_options == ("--set", "kv_format=int4", "--set", "block_size=64")
    assert not static.is_tuned
    profile = read_profile(DEFAULT_PROFILE)
    predictor = side("predictor", DEFAULT_PROFILE, profile)
    where = str(DEFAULT_PROFILE.resolve())
    assert dict(predictor.policy or ()) == {"use": "predictor", "profile": where}
    assert dict(side("default", DEFAULT_PROFILE, profile).policy or ()) == {"rules": "default", "profile": where}
    mine = tmp_path / "mine.yaml"
    mine.write_text((Path(DEFAULT_PROFILE).parents[2] / "policies/presets/default.yaml").read_text())
    assert dict(side(str(mine), None, None).policy or ()) == {"rules": str(mine)}
    assert side(NATIVE, None, None).engine_options == ()


def test_what_simulations_hold_to_no_budget_daemons_do_not_either() -> None:
    free = {"rules": "literature", "quality_budget": None}
    assert dict(side("literature", None, None).policy or ()) == free
    own = side("unbudgeted:default", DEFAULT_PROFILE, None)
    assert dict(own.policy or ()) == {
        "rules": "default",
        "profile": str(DEFAULT_PROFILE.resolve()),
        "quality_budget": None,
    }
    assert own.label == "unbudgeted:default"
    assert not side("unbudgeted:static:kv_format=int4", None, None).is_tuned
    assert "quality_budget" not in dict(side("default", None, None).policy or ())
    for one in ("literature", "unbudgeted:default", "auto"):
        parse_config(yaml.safe_dump({"policy": dict(side(one, None, None).policy or ())}))


def test_a_profile_for_the_budget_alone_is_for_rules() -> None:
    assert dict(side("default", DEFAULT_PROFILE, None).policy or ())["profile"] == str(DEFAULT_PROFILE.resolve())
    assert dict(side("auto", DEFAULT_PROFILE, None).policy or ()) == {"use": "auto"}
    with pytest.raises(ValueError, match="name one"):
        side("predictor", DEFAULT_PROFILE, None)


def test_the_bundled_models_profile_is_for_that_model_and_may_be_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "envs" / "profiles").mkdir(parents=True)
    package = bundled._package
    monkeypatch.setattr(bundled, "_package", lambda name: tmp_path / "envs" if name == "envs" else package(name))
    assert bundled_profile(bundled_model()) is None
    comes_with_it = tmp_path / "envs" / "profiles" / "bundled_cpu.yaml"
    comes_with_it.write_text("")
    assert bundled_profile(bundled_model()) == comes_with_it
    assert bundled_profile(tmp_path) is None


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("default", "default"), "compared with itself"),
        (("nothing-like-it", NATIVE), "nothing-like-it"),
        (("predictor", NATIVE), "profile"),
        (("default", "static:kv_format=int3"), "int3"),
        (("default", "learned:/nowhere"), "/nowhere"),
    ],
)
def test_wrong_names_are_one_line(names: tuple[str, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        sides(names, None, None)
    assert "\n" not in str(caught.value)


def arm(name: str, good: int, offered: int = 20) -> Arm:
    summary = dataclasses.replace(
        summarise([], Targets()), offered=offered, completed=offered - 1, within_targets=good, goodput_rps=good / 10
    )
    return Arm(side(name, None, None), summary, Seen())


def test_sides_are_compared_round_by_round_with_native() -> None:
    three = sides(("default", "static:kv_format=int4", NATIVE), None, None)
    arms = [arm(one.name, good) for one, good in zip((*three, *three), (12, 8, 4, 18, 9, 6), strict=True)]
    figures = side_figures(arms, three, {})
    assert figures["default"]["inside"] == [0.6, 0.9]
    assert (figures["default"]["ratio"], figures["default"]["ratio_range"]) == (3.0, [3.0, 3.0])
    int4 = figures["static:kv_format=int4"]
    assert (int4["ratio"], int4["ratio_range"]) == (1.75, [1.5, 2.0])
    assert figures[NATIVE]["lost"] == 2
    assert {row["ratio_to"] for row in figures.values()} == {NATIVE}
    console = Console(record=True, width=120)
    console.print(sides_table(figures))
    assert "1.75 (1.50 to 2.00)" in console.export_text()


def test_one_round_has_no_range() -> None:
    two = sides(("default", NATIVE), None, None)
    figures = side_figures([arm("default", 12), arm(NATIVE, 4)], two, {})
    assert figures["default"]["ratio"] == 3.0
    assert "ratio_range" not in figures["default"]
    console = Console(record=True, width=120)
    console.print(sides_table(figures))
    shown = console.export_text()
    assert "3.00" in shown
    assert " to " not in shown


def test_a_round_in_which_native_served_nothing_has_no_ratio() -> None:
    two = sides(("default", NATIVE), None, None)
    figures = side_figures([arm("default", 5), arm(NATIVE, 0)], two, {})
    assert figures["default"]["ratio"] is None
    Console(record=True).print(sides_table(figures))


def test_agreement_counts_pairs_that_differ_by_a_tenth() -> None:
    three = sides(("default", "static:kv_format=int4", NATIVE), None, None)
    arms = [arm("default", 18), arm("static:kv_format=int4", 17), arm(NATIVE, 5)]
    told = {"default": Foretold((0.8,), 3), "static:kv_format=int4": Foretold((0.9,), 0), NATIVE: Foretold((0.2,), 0)}
    assert order_agreement(arms, three, told) == {"tau": 1.0, "pairs": 2}
    told[NATIVE] = Foretold((1.0,), 0)
    assert order_agreement(arms, three, told) == {"tau": -1.0, "pairs": 2}


def test_the_simulator_plays_the_same_sides_on_the_same_pool() -> None:
    profile = read_profile(DEFAULT_PROFILE)
    pool = profile.pool_bytes // 16
    trace = from_requests("t", [TraceRequest(i * 0.1, 900, 160) for i in range(60)])
    three = sides(("default", "static:kv_format=int4", NATIVE), None, profile)
    lines: list[str] = []
    told = foretell(
        three, [trace], profile, pool_bytes=pool, targets=SimulatedTargets(3.0, 0.1), settle_s=9.0,
        progress=lines.append,
    )  # fmt: skip
    assert told["default"].inside[0] > told[NATIVE].inside[0]
    assert told["static:kv_format=int4"].inside[0] > told[NATIVE].inside[0]
    assert told["default"].changes > 0
    assert told[NATIVE].changes == told["static:kv_format=int4"].changes == 0
    assert len(lines) == 3
