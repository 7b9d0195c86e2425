"""What every adapter owes to whoever watches through it: our engine, vLLM, SGLang, llama.cpp's server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from autotune.adapters.base import EngineAdapter
from autotune.adapters.find import KINDS, adapter_of
from autotune.adapters.own import OwnEngine
from autotune.collector import implausible
from engine.clock import ManualClock
from engine.control_client import EngineUnreachable
from engine.stats import EngineStats
from engine.tunables import CostClass
from envs.features import FEATURES, View
from envs.signals import Targets
from envs.spaces import observe
from envs.window import StatsWindow


@dataclass
class World:
    """An engine and an adapter that watches it, under a clock of the test's."""

    adapter: EngineAdapter
    engine: Any
    clock: ManualClock

    def read(self) -> EngineStats:
        """A second later."""
        self.clock.advance_s(1)
        if hasattr(self.engine, "figures") and isinstance(self.engine.figures, EngineStats):
            self.engine.figures.stamp_ns = self.clock.now_ns()
        (reading,) = self.adapter.read().values()
        return reading

    def serve(self, number: int) -> None:
        served = self.engine.serve_requests if hasattr(self.engine, "serve_requests") else self.engine.figures.serve
        served(number)


@pytest.fixture(params=["autotune", *KINDS])
def world(request: pytest.FixtureRequest, fakes: Any, fake_engines: Any) -> Iterator[World]:
    clock = ManualClock(start_ns=10**9)
    if request.param == "autotune":
        engine = fakes.FakeEngine(clock)
        yield World(OwnEngine(engine), engine, clock)
        return
    with fake_engines.FakeServer(request.param, fake_engines.KNOBS[request.param]) as server:
        yield World(adapter_of(request.param, server.url, clock), server, clock)


def test_it_says_who_it_is(world: World) -> None:
    world.read()
    found = world.adapter.identity()
    assert found.kind == world.adapter.kind
    assert found.model
    assert world.adapter.kind in str(found)


def test_knobs_are_declared_and_those_in_force_are_declared_values(world: World) -> None:
    tunables = world.adapter.tunables
    assert tunables
    for name, tunable in tunables.items():
        assert tunable.name == name
        assert tunable.default in tunable.values
        assert tunable.description
    classes = {tunable.cost_class for tunable in tunables.values()}
    assert classes == {CostClass.RESTART} or (world.adapter.kind == "autotune" and CostClass.RESTART not in classes)
    for knob, value in world.read().effective.items():
        assert value in tunables[knob].values


def test_what_is_served_between_two_readings_is_what_grows(world: World) -> None:
    before = world.read()
    world.serve(5)
    after = world.read()
    window = StatsWindow.between(before, after)
    assert window.duration_s == 1
    assert window.count("generation_tokens")
    assert window.count("requests_completed") in {5, None}
    assert window.count("requests_offered") in {5, None}
    gap = window.quantile("itl", 0.5)
    assert gap is None or gap == pytest.approx(0.02, rel=0.5)


def test_what_is_not_told_is_unknown_and_never_zero(world: World) -> None:
    reading = world.read()
    if world.adapter.kind == "autotune":
        return
    assert reading.counters.recoded_tokens is None
    assert reading.gauges.kv_pool_bytes is None
    assert reading.gauges.running == 0
    if world.adapter.kind == "llamacpp":
        assert (reading.ttft, reading.itl, reading.gauges.kv_usage) == (None, None, None)
        assert (reading.counters.requests_completed, reading.counters.requests_offered) == (None, None)


def test_every_feature_can_be_computed_and_the_reading_is_believed(world: World) -> None:
    before = world.read()
    world.serve(3)
    after = world.read()
    assert implausible(after, before) is None
    window = StatsWindow.between(before, after)
    seen = observe(View(window, window, Targets()), stamp_ns=1, observed_s=1.0)
    assert set(seen.values) == {feature.name for feature in FEATURES}
    assert seen.values["running"] is not None
    assert seen.vector().shape
    json.dumps(after.to_json())


def test_a_restart_is_another_instance(world: World) -> None:
    world.serve(5)
    first = world.read()
    assert world.read().instance == first.instance
    world.engine.restart()
    world.serve(1)
    again = world.read()
    assert again.instance != first.instance
    assert implausible(again, None) is None
    assert StatsWindow.between(first, again).before is None


def test_an_engine_that_is_away_is_away(world: World) -> None:
    world.read()
    assert world.adapter.healthy()
    world.engine.alive = False
    assert not world.adapter.healthy()
    with pytest.raises(EngineUnreachable):
        world.adapter.read()
    world.engine.alive = True
    assert world.adapter.healthy()
    world.read()
