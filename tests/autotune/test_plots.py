"""The figures that the page plots: bounded, unknown as unknown, and only what is new."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from autotune.dashboard.plots import COLUMNS, EVERY_S, FORMATS, OBSERVED, PlotHistory, plotted
from engine.clock import ManualClock
from engine.stats import ResidentBytes
from envs.features import FEATURES

S = 1_000_000_000


def points(history: PlotHistory, after: int = 0) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(history.json_since(after))
    return document


def test_observed_columns_are_features() -> None:
    assert set(OBSERVED) <= {feature.name for feature in FEATURES}
    assert len(set(COLUMNS)) == len(COLUMNS)


def test_only_what_is_new_is_given() -> None:
    history = PlotHistory(("a", "b"), size=10, every_s=1)
    assert points(history) == {"last": 0, "t": [], "columns": {"a": [], "b": []}}
    for number in range(3):
        history.add(number * S, 100.5 + number, {"a": number, "b": 0.123456})
    assert points(history) == {
        "last": 3,
        "t": [100.5, 101.5, 102.5],
        "columns": {"a": [0, 1, 2], "b": [0.1235, 0.1235, 0.1235]},
    }
    assert points(history, 2) == {"last": 3, "t": [102.5], "columns": {"a": [2], "b": [0.1235]}}
    assert points(history, 3)["t"] == []
    assert points(history, 99)["t"] == [100.5, 101.5, 102.5], "a page that knows more than there is gets all"


def test_points_too_close_together_are_left_out() -> None:
    history = PlotHistory(("a",), size=10, every_s=3)
    for number in range(10):
        history.add(number * S, float(number), {"a": number})
    assert points(history)["t"] == [0, 3, 6, 9]


def test_the_oldest_give_way_and_the_memory_stays() -> None:
    history = PlotHistory(("a",), size=4, every_s=1)
    before = history.nbytes
    for number in range(11):
        history.add(number * S, float(number), {"a": number})
    assert history.nbytes == before
    assert points(history) == {"last": 11, "t": [7, 8, 9, 10], "columns": {"a": [7, 8, 9, 10]}}
    assert points(history, 3)["t"] == [7, 8, 9, 10], "what is gone is gone"
    assert points(history, 9)["t"] == [9, 10]


def test_an_hour_takes_a_tenth_of_a_megabyte() -> None:
    history = PlotHistory()
    assert history.size * history.every_s == 3600
    assert history.nbytes < 128_000
    for number in range(history.size + 5):
        history.add(round(number * EVERY_S * S), 1.8e9 + number * EVERY_S, dict.fromkeys(COLUMNS, 123456.789))
    assert len(history.json_since(0)) < 250_000


@pytest.mark.parametrize("unknown", [None, math.nan, math.inf, 1e300])
def test_what_is_unknown_is_null_and_never_0(unknown: float | None) -> None:
    history = PlotHistory(("a", "b"), size=4, every_s=1)
    history.add(0, 1.0, {"a": unknown})
    assert points(history)["columns"] == {"a": [None], "b": [None]}


def test_bytes_are_summed_by_format(fakes: Any, make_rig: Any) -> None:
    engine = fakes.FakeEngine(ManualClock(start_ns=1))
    engine.figures.gauges.resident = [
        ResidentBytes("int4", 32, 1000, 1),
        ResidentBytes("int4", 64, 500, 1),
        ResidentBytes("fp8", 16, 7, 1),
    ]
    rig = make_rig()
    point = plotted(rig.parts.env.observation, engine.stats(), 1.0, 0.1)
    assert {name: point[column] for name, column in FORMATS.items()} == {
        "native": 0,
        "int8": 0,
        "k8v4": 0,
        "int4": 1500,
    }
    assert point["kv_other_bytes"] == 7
    assert point["ttft_target_s"] == 1.0
    lost = plotted(rig.parts.env.observation, None, 1.0, 0.1)
    assert lost.get("kv_pool_bytes") is None
    assert set(point) == set(COLUMNS)


def test_the_loop_fills_it_and_a_lost_engine_leaves_a_gap(make_rig: Any) -> None:
    rig = make_rig("engine: {stale_after_s: 1}")
    rig.run_s(10)
    known = points(rig.parts.plots)
    assert known["columns"]["kv_usage"] == [0.1] * len(known["t"])
    assert len(known["t"]) >= 3
    rig.engine.alive = False
    rig.run_s(10)
    lost = points(rig.parts.plots, known["last"])
    assert lost["columns"]["load"][-1] is None
    assert lost["columns"]["kv_native_bytes"][-1] is None
    assert lost["columns"]["ttft_target_s"][-1] == 1, "the target holds without an engine"
