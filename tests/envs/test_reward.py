"""The reward's terms: what earns, what costs, what is unknown."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from engine.stats import EngineStats, ResidentBytes
from engine.tunables import CostClass, default_values
from envs.port import Change
from envs.reward import (
    Charge,
    Objective,
    QualityTable,
    RewardWeights,
    charge_of,
    literature_quality,
    loss_per_token,
    reward_terms,
)
from envs.signals import Targets
from envs.window import StatsWindow

QUALITY = QualityTable({"native": 0.0, "int8": 0.001, "k8v4": 0.01, "int4": 0.03}, evicted=0.2)
TARGETS = Targets(ttft_s=1.0, tbt_s=0.1)


def reading(seconds: float) -> EngineStats:
    return EngineStats("a", "m", round(seconds * 1e9), 4096, 64, 0, default_values())


def busy(*, late: int = 0, formats: dict[str, int] | None = None, evicted: int | None = None) -> StatsWindow:
    """Ten seconds: 20 requests, 400 tokens, ``late`` of the first tokens after 5 s."""
    before, after = reading(0), reading(10)
    after.counters.requests_offered = after.counters.requests_completed = 20
    after.counters.generation_tokens, after.counters.prompt_tokens = 400, 2000
    after.ttft.observe(0.2, times=20 - late)
    after.ttft.observe(5.0, times=late)
    after.gauges.resident = [ResidentBytes(name, 32, 1, tokens) for name, tokens in (formats or {}).items()]
    after.gauges.evicted_running_tokens = evicted
    return StatsWindow.between(before, after)


def total(window: StatsWindow, weights: RewardWeights | None = None, change: Change | None = None) -> float:
    return reward_terms(window, TARGETS, QUALITY, weights or RewardWeights(), change).total


def test_requests_inside_all_targets_earn() -> None:
    assert total(busy()) == pytest.approx(2.0)
    assert total(busy(late=10)) == pytest.approx(1.0 - 0.5 * 1.0)


def test_refused_and_failed_ones_cost() -> None:
    window = busy()
    assert window.after is not None
    window.after.counters.requests_rejected, window.after.counters.requests_failed = 20, 10
    assert total(window) == pytest.approx(2.0 - 0.5 * 3.0)


def test_quality_is_charged_per_token_by_what_is_stored() -> None:
    half = reward_terms(busy(formats={"native": 100, "int4": 100}), TARGETS, QUALITY, RewardWeights())
    assert half.quality == pytest.approx(0.3 * 40 * 0.015)
    idle = reading(10)
    idle.gauges.resident = [ResidentBytes("int4", 32, 1, 100)]
    quiet = reward_terms(StatsWindow.between(reading(0), idle), TARGETS, QUALITY, RewardWeights())
    assert quiet.known
    assert quiet.total == 0  # a night without tokens costs nothing


def test_more_loss_never_pays() -> None:
    losses = [loss_per_token(busy(formats={name: 100}), QUALITY) for name in ("native", "int8", "k8v4", "int4")]
    assert losses == sorted(losses, key=lambda loss: loss or 0.0)
    assert loss_per_token(busy(formats={"native": 100}, evicted=100), QUALITY) == pytest.approx(0.1)
    assert loss_per_token(busy(), QUALITY) == 0
    assert loss_per_token(busy(formats={"fp3": 10}), QUALITY) is None
    assert loss_per_token(StatsWindow(None, None), QUALITY) is None


def test_evicted_tokens_are_charged_by_the_way_of_evicting() -> None:
    quality = replace(QUALITY, evicted_by={"heavy_hitter": 0.04})
    window = busy(formats={"native": 100}, evicted=100)
    assert window.after is not None
    for way, loss in (("none", 0.2), ("window", 0.2), ("heavy_hitter", 0.04), (None, 0.2)):
        window.after.effective = {"eviction": way}  # type: ignore[dict-item]
        assert loss_per_token(window, quality) == pytest.approx(loss / 2)
    assert literature_quality().loss_evicted("heavy_hitter") < literature_quality().loss_evicted("window")
    with pytest.raises(ValueError, match="loss"):
        replace(QUALITY, evicted_by={"window": -0.1})


def test_the_books_are_not_fooled_by_shared_prefixes() -> None:
    """Of what running sequences have computed half is dropped, however much is resident besides for nobody."""
    window = busy(formats={"native": 2000, "int8": 500}, evicted=500)
    assert window.after is not None
    window.after.gauges.resident_tokens = 1000
    window.after.effective = {"eviction": "window"}
    charge = charge_of(window, QUALITY)
    stored = 0.2 * QUALITY.by_format["int8"]
    assert charge.tokens == 400
    assert charge.loss == pytest.approx(0.5 * stored + 0.5 * QUALITY.evicted)
    assert charge_of(busy(formats={"int8": 10}), QUALITY).loss == QUALITY.by_format["int8"]
    assert charge_of(StatsWindow(None, None), QUALITY) == Charge(None, None)


def test_switching_is_paid_once_by_cost_class() -> None:
    weights = RewardWeights(switching={CostClass.STEP: 0.1, CostClass.BACKGROUND: 0.2, CostClass.RESTART: 9})
    assert total(busy(), weights, Change("kv_format", "int8")) == pytest.approx(1.8)
    assert total(busy(), weights, Change("max_num_seqs", 8)) == pytest.approx(1.9)


def test_batch_work_is_paid_by_tokens_and_lateness_is_free() -> None:
    weights = RewardWeights(objective=Objective.BATCH)
    assert total(busy(late=20), weights) == pytest.approx(0.01 * 240)


def test_unknown_windows_earn_nothing() -> None:
    for window in (StatsWindow(None, None), StatsWindow.between(None, reading(1))):
        terms = reward_terms(window, TARGETS, QUALITY, RewardWeights())
        assert not terms.known
        assert terms.total == 0


def test_hostile_figures_stay_finite() -> None:
    before, after = reading(0), reading(1)
    after.counters.requests_completed = math.nan  # type: ignore[assignment]
    after.gauges.resident = [ResidentBytes("int4", 32, 1, math.inf)]  # type: ignore[arg-type]
    assert math.isfinite(total(StatsWindow.between(before, after)))


def test_quality_tables_are_checked() -> None:
    assert set(literature_quality().by_format) == {"native", "int8", "k8v4", "int4"}
    with pytest.raises(ValueError, match="loss >= 0"):
        QualityTable({"native": 0.0}, evicted=0.1)
    with pytest.raises(ValueError, match="loss >= 0"):
        QualityTable({**QUALITY.by_format, "int4": -1.0}, evicted=0.1)
