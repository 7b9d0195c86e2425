"""The only writer: modes, conflicts, overrides, answers that never came."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.actuator import Actuator
from engine.clock import ManualClock
from envs.port import ApplyStatus, Change

CHANGE = Change("kv_format", "int8")


@pytest.fixture
def engine(fakes: Any) -> Any:
    return fakes.FakeEngine(ManualClock())


@pytest.fixture
def actuator(engine: Any) -> Actuator:
    made = Actuator(engine, mode="active", latest=lambda: None, now_ns=engine.clock.now_ns)
    made.refresh()
    return made


def test_a_write_carries_name_reason_and_revision(actuator: Actuator, engine: Any) -> None:
    actuator.reason = "memory-pressure: kv_usage 0.9"
    result = actuator.apply(CHANGE)
    assert result.status is ApplyStatus.APPLIED
    assert result.change == CHANGE
    record = engine.state.writers["kv_format"]
    assert (record.writer, record.reason, record.revision) == ("autotune", "memory-pressure: kv_usage 0.9", 1)
    assert actuator.apply(Change("block_size", 32)).took_effect, "its own write must not conflict with its next"


@pytest.mark.parametrize("mode", ["advise", "off"])
def test_only_active_writes(actuator: Actuator, engine: Any, mode: str) -> None:
    actuator.mode = mode
    result = actuator.apply(CHANGE)
    assert result.status is ApplyStatus.REFUSED
    assert mode in result.why
    assert engine.state.revision == 0


def test_a_write_by_somebody_else_since_the_refresh_is_a_conflict(actuator: Actuator, engine: Any) -> None:
    engine.patch({"block_size": 64}, writer="operator:anna")
    result = actuator.apply(CHANGE)
    assert result.status is ApplyStatus.CONFLICT
    assert result.change is None
    assert engine.state.desired["kv_format"] == "native"


def test_who_owns_what(actuator: Actuator, engine: Any) -> None:
    engine.patch({"block_size": 64}, writer="operator:anna", reason="mine")
    engine.patch({"max_num_seqs": 8}, writer="operator:anna")
    engine.patch({"max_num_seqs": 8}, writer="release:operator:anna")
    actuator.refresh()
    actuator.apply(CHANGE)
    actuator.refresh()
    assert {knob: w.writer for knob, w in actuator.writers().items()} == {
        "block_size": "operator:anna",
        "kv_format": "autotune",
    }
    assert list(actuator.overrides()) == ["block_size"]
    refused = actuator.apply(Change("block_size", 16))
    assert refused.status is ApplyStatus.REFUSED
    assert "operator:anna" in refused.why


def test_without_an_engine_nothing_raises(actuator: Actuator, engine: Any) -> None:
    engine.alive = False
    assert actuator.poll() is None
    assert actuator.apply(CHANGE).status is ApplyStatus.LOST
    assert actuator.refresh() is None
    assert actuator.overrides() == {}
    assert actuator.apply(CHANGE).status is ApplyStatus.LOST
    assert "no engine" in actuator.last_error


@pytest.mark.parametrize(
    ("results", "status"),
    [
        ({}, ApplyStatus.REJECTED),
        ({"kv_format": {"status": "surprise", "why": "?"}}, ApplyStatus.REJECTED),
        ({"kv_format": {"status": "rejected", "why": "no"}}, ApplyStatus.REJECTED),
        ({"kv_format": {"status": "converging", "why": ""}}, ApplyStatus.CONVERGING),
    ],
)
def test_every_answer_is_understood(actuator: Actuator, engine: Any, results: Any, status: Any) -> None:
    engine.patch = lambda *_, **__: {"revision": 7, "results": results}
    result = actuator.apply(CHANGE)
    assert result.status is status
    assert (result.change is None) == (status is ApplyStatus.REJECTED)
