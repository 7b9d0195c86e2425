"""The wire tap between daemon and engine: it changes nothing, notes every write, and goes off when aimed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.bench.tap import Moment, Tap
from engine.clock import RealClock
from engine.control_client import ControlClient, EngineUnreachable


@pytest.fixture
def tapped(fakes: Any, tmp_path: Path) -> Iterator[Any]:
    engine = fakes.FakeEngine(RealClock())
    with (
        fakes.FakeControlServer(engine, tmp_path / "e.sock"),
        Tap(tmp_path / "t.sock", tmp_path / "e.sock", RealClock()) as tap,
        ControlClient(tmp_path / "t.sock", timeout_s=20) as client,
    ):
        yield engine, tap, client


def test_it_passes_everything_and_notes_what_is_written(tapped: Any) -> None:
    engine, tap, client = tapped
    assert client.stats().instance == "instance-1"
    assert client.patch({"kv_format": "int8"}, writer="autotune")["revision"] == 1
    assert client.patch({"kv_format": "int4"}, writer="autotune", if_revision=0)["results"]["kv_format"]["status"] == (
        "conflict"
    )
    assert client.tunables()["desired"]["kv_format"] == "int8"
    noted = [(write.changes, write.reached, write.status, write.results) for write in tap.writes]
    assert noted == [
        ({"kv_format": "int8"}, True, 200, {"kv_format": "applied"}),
        ({"kv_format": "int4"}, True, 409, {"kv_format": "conflict"}),
    ]
    assert engine.state.revision == 1


@pytest.mark.parametrize(
    ("moment", "revision", "seen"), [(Moment.UNSENT, 0, 0), (Moment.UNANSWERED, 1, 0), (Moment.ANSWERED, 1, 1)]
)
def test_it_goes_off_once_at_the_moment_that_it_was_aimed_at(
    tapped: Any, moment: Moment, revision: int, seen: int
) -> None:
    engine, tap, client = tapped
    gone_off: list[int] = []

    def action() -> None:
        gone_off.append(sum(write.status is not None for write in tap.writes))

    tap.arm(moment, action)
    client.tunables()
    assert gone_off == [], "a reading is no write"
    if moment is Moment.UNSENT:
        with pytest.raises(EngineUnreachable):
            client.patch({"kv_format": "int8"}, writer="autotune")
    else:
        client.patch({"kv_format": "int8"}, writer="autotune")
    assert tap.fired.wait(20)
    assert gone_off == [seen]
    assert engine.state.revision == revision
    assert not tap.disarm()
    client.patch({"kv_format": "int4"}, writer="autotune")
    assert gone_off == [seen]


def test_without_an_engine_the_line_is_dead(tmp_path: Path) -> None:
    with (
        Tap(tmp_path / "t.sock", tmp_path / "none.sock", RealClock()),
        ControlClient(tmp_path / "t.sock", timeout_s=20) as client,
        pytest.raises(EngineUnreachable),
    ):
        client.tunables()
