"""Interquartile means, paired resampling, costs and shifts on numbers whose answer is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from policies.evaluation.cells import Score, Segment, reversals
from policies.evaluation.cost import Ladder, cost, reduction, sustained
from policies.evaluation.figures import losing, regret_to_best_static
from policies.evaluation.scenarios import Scenario
from policies.evaluation.shift import shift
from policies.evaluation.statistics import (
    improvement,
    iqm,
    iqm_difference,
    iqm_interval,
    iqm_ratio,
    seed_draws,
)
from policies.evaluation.table import Table
from policies.play import Move


def score(attainment: float = 0.5, quality: float = 0.0, parts: tuple[int, ...] = (), **more: float) -> Score:
    segments = tuple(Segment(good, 100, 100 * quality) for good in parts)
    figures = {"window_tokens": 100, "full_share": 0.0, "preemptions": 0, **more}
    return Score(
        offered=100, completed=100, good=round(100 * attainment), refused=0, goodput_rps=attainment,
        attainment=attainment, tokens=1000, prompt_tokens=1000, quality=quality, ttft_p95_s=1.0, tbt_p95_s=0.1,
        changes=0, reversals=0, segments=segments, **figures,
    )  # type: ignore[arg-type]  # fmt: skip


def table(budget: float = 0.01, scenario: str = "chat-steady", **rows: list[Score]) -> Table:
    statics = tuple(name for name in rows if name != "policy")
    return Table((Scenario.parse(scenario),), {name: [row] for name, row in rows.items()}, statics, budget)


def test_the_middle_half_is_what_counts() -> None:
    assert iqm(np.array([0.0, 1.0, 2.0, 1000.0])) == 1.5
    assert iqm(np.array([1.0, 5.0])) == 3.0
    assert np.allclose(iqm(np.arange(16.0).reshape(2, 8)), [3.5, 11.5])


def test_an_interval_covers_the_truth_as_often_as_it_says() -> None:
    """Normal scores of one workload: the mean lies inside in roughly 95 of 100 cases, and outside in some."""
    rng, inside = np.random.default_rng(0), 0
    for _ in range(300):
        found = iqm_interval(rng.normal(2.0, 1.0, size=(3, 20)), seed_draws(3, 20, 300))
        inside += found.low <= 2.0 <= found.high
    assert 0.88 <= inside / 300 < 1.0


def test_differences_are_paired() -> None:
    """Common requests: noise that both share does not blur what differs."""
    noise = np.random.default_rng(1).normal(size=(2, 10))
    found = iqm_difference(0.1 + noise, noise, seed_draws(2, 10, 500))
    assert found.value == pytest.approx(0.1)
    assert found.high - found.low < 1e-9
    ratio = iqm_ratio(2 * np.abs(noise), np.abs(noise), seed_draws(2, 10, 500))
    assert (ratio.low, ratio.high) == (pytest.approx(2.0), pytest.approx(2.0))
    assert improvement(0.1 + noise, noise, seed_draws(2, 10, 500)).value == 1.0
    assert improvement(noise, noise, seed_draws(2, 10, 500)).value == 0.5


def test_resampling_stays_inside_each_workload() -> None:
    """Two workloads that are constant in themselves have no spread, however far apart they are."""
    found = iqm_interval(np.array([[0.0] * 5, [10.0] * 5]), seed_draws(2, 5, 400))
    assert found.low == found.high == found.value == 5.0


def test_no_ratio_to_nothing() -> None:
    found = iqm_ratio(np.ones((1, 4)), np.zeros((1, 4)), seed_draws(1, 4, 50))
    assert not math.isfinite(found.value)
    assert found.to_json() == {"value": None, "low": None, "high": None}


def test_the_best_static_keeps_the_budget() -> None:
    rows = {"none": [score(0.2)] * 3, "lossy": [score(0.9, quality=0.02)] * 3, "mild": [score(0.5, quality=0.001)] * 3}
    assert table(**rows).best_static(0) == "mild"
    assert table(budget=0.05, **rows).best_static(0) == "lossy"
    assert table(budget=0.0, **rows).best_static(0) == "none"


def test_regret_and_losing_workloads() -> None:
    one = table(none=[score(0.8)] * 4, policy=[score(0.6)] * 4)
    regret = regret_to_best_static(one, "policy", [0])
    assert regret is not None
    assert regret.value == pytest.approx(0.25)
    assert losing(one, "policy", one.attainment("none")) == ["chat-steady"]
    noisy = table(none=[score(0.8), score(0.2)] * 2, policy=[score(0.6), score(0.5)] * 2)
    assert losing(noisy, "policy", noisy.attainment("none")) == []


def test_pressure_is_a_full_pool_or_a_preemption() -> None:
    assert table(none=[score(full_share=0.2)] * 2).pressured == [0]
    assert table(none=[score(full_share=0.19)] * 2).relaxed == [0]
    assert table(none=[score(preemptions=1), score()]).pressured == [0]
    assert table(none=[score(preemptions=1), score(), score()]).pressured == []


def test_headroom_is_what_changing_settings_could_gain() -> None:
    """Each static is good at one half: 20 alone, 30 together, of which a policy reached 25."""
    one = table(none=[score(parts=(15, 5))] * 3, other=[score(parts=(5, 15))] * 3, policy=[score(parts=(12, 13))] * 3)
    found = shift(one, 0, "policy", seed_draws(1, 3, 50))
    assert found.headroom.value == pytest.approx(0.5)
    assert found.gain.value == pytest.approx(0.25)


def test_headroom_keeps_the_quality_budget() -> None:
    """The lossy static may be used in one part of two, not in both."""
    one = table(
        budget=0.01, none=[score(parts=(5, 5))] * 2, lossy=[score(parts=(15, 25), quality=0.02)] * 2,
        policy=[score(parts=(5, 5))] * 2,
    )  # fmt: skip
    assert shift(one, 0, "policy", seed_draws(1, 2, 50)).headroom.value == pytest.approx(2.0)
    assert shift(one, 0, "policy", seed_draws(1, 2, 50)).gain.value == pytest.approx(0.0)


def ladder(*attainment: float, rps: float = 1.0) -> Ladder:
    return Ladder((1.0, 2.0, 4.0), np.array([attainment] * 3), rps, 100.0)


def test_the_rate_at_equal_attainment_is_interpolated() -> None:
    assert sustained((1.0, 2.0, 4.0), np.array([1.0, 0.95, 0.85]), 0.9) == (pytest.approx(2.0**1.5), False)
    assert sustained((1.0, 2.0, 4.0), np.array([1.0, 1.0, 1.0]), 0.9) == (4.0, True)
    assert sustained((1.0, 2.0, 4.0), np.array([0.5, 1.0, 1.0]), 0.9) == (0.0, True)
    assert sustained((1.0, 2.0, 4.0), np.array([1.0, 0.8, 1.0]), 0.9)[0] == pytest.approx(2.0**0.5)


def test_twice_the_rate_is_half_the_cost() -> None:
    slow, fast = ladder(0.9, 0.5, 0.1), ladder(1.0, 0.9, 0.5)
    assert cost(slow, 0.9, 3.6).per_million == pytest.approx(3.6 / 3600 * 1e6 / 100)
    found, by_workload = reduction({"w": fast}, {"w": slow}, 0.9, seed_draws(1, 3, 20))
    assert found.value == pytest.approx(0.5)
    assert by_workload["w"].low == pytest.approx(0.5)
    never = ladder(0.1, 0.1, 0.1)
    assert cost(never, 0.9, 3.6).per_million is None
    assert not math.isfinite(reduction({"w": fast}, {"w": never}, 0.9, seed_draws(1, 3, 20))[0].value)


def test_a_reversal_is_a_change_back() -> None:
    moves = [
        Move(1.0, change, "") for change in ("kv_format=int8", "kv_format=int4", "kv_format=int8", "block_size=32")
    ]
    assert reversals(moves, {"kv_format": "native", "block_size": 16}) == 1
    assert reversals(moves[:2], {"kv_format": "int4", "block_size": 16}) == 1
