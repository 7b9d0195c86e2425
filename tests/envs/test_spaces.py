"""Observations stay finite and inside their boxes whatever an engine says; actions and masks are exact."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.stats import Counters, EngineStats, Gauges, Histogram, ResidentBytes
from engine.tunables import TUNABLES, default_values
from envs.features import FEATURES, Targets, View
from envs.port import Change
from envs.spaces import (
    NOTHING,
    Observation,
    action_mask,
    action_space,
    all_changes,
    decode_action,
    encode_action,
    legal_action,
    observation_space,
    observe,
    vector_names,
)
from envs.window import StatsWindow

junk = st.one_of(
    st.integers(-10, 10**6),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([10**400, -(10**30), None, "12", True, -0.0, 1e-320, 1e308]),
)


@st.composite
def histograms(draw: st.DrawFn) -> Histogram:
    histogram = Histogram()
    for _ in range(draw(st.integers(0, 3))):
        histogram.counts[draw(st.integers(0, 175))] = draw(junk)
    histogram.sum_s = draw(junk)
    return histogram


@st.composite
def readings(draw: st.DrawFn) -> EngineStats:
    counters = Counters(**{f.name: draw(junk) for f in fields(Counters)})
    gauges = Gauges(**{f.name: draw(junk) for f in fields(Gauges) if f.name not in {"resident", "kv_bytes_per_token"}})
    row = st.builds(ResidentBytes, st.sampled_from(["native", "int8", "fp3", ""]), junk, junk, junk)
    gauges.resident = draw(st.lists(row, max_size=3))
    gauges.kv_bytes_per_token = draw(st.dictionaries(st.sampled_from(["native", "int8", "x"]), junk, max_size=2))
    effective = draw(st.dictionaries(st.sampled_from([*TUNABLES, "other"]), junk | st.just("int8"), max_size=4))
    return EngineStats(
        instance=draw(st.sampled_from(["a", "b"])),
        model="m",
        stamp_ns=draw(st.integers(0, 10) | st.sampled_from([10**30, 2**63])),
        max_model_len=draw(junk),
        max_num_seqs=draw(junk),
        revision=draw(junk),
        effective=effective,
        counters=counters,
        gauges=gauges,
        **{name: draw(histograms()) for name in ("ttft", "itl", "e2e", "queue", "prompt_lengths", "output_lengths")},
    )


def view_of(before: EngineStats | None, after: EngineStats | None, since_change_s: float | None = None) -> View:
    window = StatsWindow.between(before, after)
    return View(window, window, Targets(), since_change_s)


def calm_reading(seconds: float, **gauges: Any) -> EngineStats:
    return EngineStats("a", "m", round(seconds * 1e9), 4096, 64, 0, default_values(), gauges=Gauges(**gauges))


def values_of(before: EngineStats | None, after: EngineStats | None) -> dict[str, float | None]:
    return dict(observe(view_of(before, after), stamp_ns=0, observed_s=1).values)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(before=st.none() | readings(), after=st.none() | readings(), since=st.none() | st.floats())
def test_any_reading_gives_a_finite_observation_inside_its_box(
    before: EngineStats | None, after: EngineStats | None, since: float | None
) -> None:
    observation = observe(view_of(before, after, since), stamp_ns=1, observed_s=2.0)
    vector = observation.vector()
    assert vector.dtype == np.float32
    assert observation_space().contains(vector)
    assert np.isfinite(vector).all()
    for feature in FEATURES:
        value = observation.values[feature.name]
        assert value is None or (math.isfinite(value) and feature.low <= value <= feature.high)
    text = json.dumps(observation.to_json(), allow_nan=False)
    assert Observation.from_json(json.loads(text)) == observation


def test_the_pools_size_is_told_and_is_no_part_of_the_vector() -> None:
    with_pool, without = (
        observe(view_of(None, calm_reading(1, kv_pool_bytes=size)), stamp_ns=0, observed_s=1) for size in (4096, 0)
    )
    assert (with_pool.pool_bytes, without.pool_bytes) == (4096, None)
    assert with_pool.vector().shape == without.vector().shape == observation_space().shape
    written = with_pool.to_json()
    del written["pool_bytes"]  # as journals were written before
    assert Observation.from_json(written).pool_bytes is None


def test_declarations_are_complete_and_unique() -> None:
    names = vector_names()
    assert len(set(names)) == len(names) == observation_space().shape[0]
    for feature in FEATURES:
        assert feature.description
        assert feature.low < feature.high
        assert feature.encode(feature.low) == 0
        assert feature.encode(feature.high) == pytest.approx(1)
        middle = (feature.low + feature.high) / 2
        assert 0 < feature.encode(middle) < 1


def test_a_lost_engine_is_all_unknown() -> None:
    observation = observe(view_of(None, None), stamp_ns=0, observed_s=0)
    assert set(observation.values.values()) == {None}
    assert observation.tunables == {}
    assert observation.instance is None
    vector = dict(zip(vector_names(), observation.vector(), strict=True))
    assert all(value == float(name.startswith("unknown:")) for name, value in vector.items())
    assert action_mask(observation.tunables).tolist() == [1] + [0] * len(all_changes())


def test_idle_is_known_and_told_apart_from_unknown() -> None:
    values = values_of(calm_reading(0), calm_reading(10))
    zero = ("load", "offered_rps", "completed_rps", "goodput_rps", "waiting", "kv_demand", "preemptions_per_s")
    assert {name: values[name] for name in zero} == dict.fromkeys(zero, 0.0)
    unknown = ("ttft_tail_s", "tbt_over_target", "hit_rate", "success_rate", "apdex", "feedback", "tokens_per_sequence")
    assert {values[name] for name in unknown} == {None}
    observation = observe(view_of(calm_reading(0), calm_reading(10)), stamp_ns=0, observed_s=0)
    vector = dict(zip(vector_names(), observation.vector(), strict=True))
    assert (vector["ttft_tail_s"], vector["unknown:ttft_tail_s"]) == (0, 1)
    assert (vector["offered_rps"], vector["unknown:offered_rps"]) == (0, 0)


def test_after_a_restart_rates_are_unknown_and_gauges_are_not() -> None:
    before, after = calm_reading(100), calm_reading(101, running=3, kv_usage=0.5)
    before.counters.requests_offered = 1000
    after.instance = "b"
    values = values_of(before, after)
    assert values["offered_rps"] is None
    assert values["kv_usage"] == 0.5
    assert values["running"] == 3


def test_offered_is_not_completed() -> None:
    before, after = calm_reading(0), calm_reading(10)
    after.counters.requests_offered, after.counters.requests_rejected, after.counters.requests_completed = 100, 30, 20
    values = values_of(before, after)
    assert values["offered_rps"] == 10
    assert values["completed_rps"] == 2
    assert values["success_rate"] == pytest.approx(0.4)


def test_latency_over_targets_attainment_and_apdex() -> None:
    before, after = calm_reading(0), calm_reading(10)
    for seconds in (0.5, 0.5, 3.0, 9.0):
        after.ttft.observe(seconds)
    after.itl.observe(0.01, times=9)
    after.itl.observe(0.5)
    after.counters.requests_completed = 4
    values = values_of(before, after)
    assert values["ttft_over_target"] == pytest.approx(9.0, rel=0.06)
    assert values["tbt_over_target"] == pytest.approx(5.0, rel=0.06)
    assert values["slo_attainment"] == pytest.approx(0.5 * 0.9)
    assert values["goodput_rps"] == pytest.approx(0.4 * 0.45)
    assert values["apdex"] == pytest.approx((2 + 1 / 2) / 4)


def test_demand_does_not_depend_on_the_format_in_force() -> None:
    told = {"native": 1000.0, "int8": 550.0, "k8v4": 430.0, "int4": 300.0}
    common: dict[str, Any] = {"running": 4, "waiting": 2, "resident_tokens": 400, "kv_pool_bytes": 1_000_000}
    rows = {
        "native": [ResidentBytes("native", 16, 400_000, 400)],
        "int4": [ResidentBytes("native", 16, 100_000, 100), ResidentBytes("int4", 32, 90_000, 300)],
    }
    seen = {
        name: values_of(calm_reading(0), calm_reading(1, resident=rows[name], kv_bytes_per_token=told, **common))
        for name in rows
    }
    # 400 tokens and two more requests of the usual 100, no lengths being known.
    assert seen["native"]["kv_demand"] == seen["int4"]["kv_demand"] == pytest.approx(0.6)
    assert seen["native"]["kv_demand_int4"] == seen["int4"]["kv_demand_int4"] == pytest.approx(0.18)
    guessed = values_of(calm_reading(0), calm_reading(1, resident=rows["native"], **common))
    assert guessed["kv_demand"] == pytest.approx(0.6)
    assert guessed["kv_demand_int4"] == pytest.approx(0.18)


def test_demand_counts_evicted_tokens_shared_ones_once_and_only_those_who_may_join() -> None:
    common: dict[str, Any] = {"kv_pool_bytes": 1000, "kv_bytes_per_token": {"native": 1.0}}
    evicted = calm_reading(1, running=2, resident_tokens=200, evicted_running_tokens=100, **common)
    assert values_of(calm_reading(0), evicted)["kv_demand"] == pytest.approx(0.2)
    evicted.gauges.resident = [ResidentBytes("native", 16, 100, 100)]
    evicted.gauges.kv_used_bytes = 100
    assert values_of(calm_reading(0), evicted)["kv_demand"] == pytest.approx(0.2)
    # Two requests of 200 tokens over one prefix of 150, and as much again idle in the prefix cache.
    rows = [ResidentBytes("native", 16, 500, 500)]
    usage = {"resident": rows, "kv_used_bytes": 250, "kv_cached_bytes": 250}
    shared = calm_reading(1, running=2, resident_tokens=400, evicted_running_tokens=0, **usage, **common)
    assert values_of(calm_reading(0), shared)["kv_demand"] == pytest.approx(0.25)
    crowded = calm_reading(1, running=60, waiting=500, resident_tokens=600, **common)
    assert values_of(calm_reading(0), crowded)["kv_demand"] == pytest.approx(0.6 + 4 * 10 / 1000)


def test_block_figures() -> None:
    rows = [ResidentBytes("native", 16, 10, 64), ResidentBytes("int8", 32, 10, 192)]
    values = values_of(calm_reading(0), calm_reading(1, running=2, resident_tokens=256, resident=rows))
    assert values["blocks_per_sequence"] == (4 + 6) / 2
    assert values["tokens_per_sequence"] == 128
    assert values["tail_waste_share"] == pytest.approx(16 / 272)
    assert values["bytes_share_int8"] == 0.5


def test_actions_and_changes_are_one_to_one() -> None:
    assert action_space().n == 1 + sum(len(t.values) for t in TUNABLES.values())
    assert decode_action(NOTHING) is None
    for action in range(int(action_space().n)):
        assert encode_action(decode_action(action)) == action
    for action in (-1, int(action_space().n)):
        with pytest.raises(ValueError, match="outside"):
            decode_action(action)
    with pytest.raises(ValueError, match="no action"):
        encode_action(Change("kv_format", "fp8"))


def test_mask_is_exact() -> None:
    in_force = default_values()
    mask = action_mask(in_force, held={"block_size"})
    assert action_space().contains(action_space().sample(mask))
    for change, allowed in zip(all_changes(), mask[1:], strict=True):
        assert allowed == (change.knob != "block_size" and in_force[change.knob] != change.value)
    assert mask[NOTHING] == 1
    masked = encode_action(Change("block_size", 64))
    assert legal_action(masked, mask) == NOTHING
    free = encode_action(Change("kv_format", "int8"))
    assert legal_action(free, mask) == free


def test_vectors_are_fresh_copies() -> None:
    observation = observe(view_of(calm_reading(0), calm_reading(1)), stamp_ns=0, observed_s=0)
    first = observation.vector()
    first[:] = 7
    assert observation_space().contains(observation.vector())


@pytest.mark.parametrize("data", [{}, {"stamp_ns": 1}, {"stamp_ns": "x", "values": 3}])
def test_what_is_not_an_observation_is_refused(data: dict[str, Any]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # int() words its own
        Observation.from_json(data)
