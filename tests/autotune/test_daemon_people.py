"""What people do with knobs: pins that end by themselves, undo, explanations, and what is left at exit."""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from autotune.writers import ends_ns, has_ended, is_the_daemons, pinned_by, until_text, who_of
from engine.clock import RealClock

PRESSURE = "policy: {rules: literature, quality_budget: null}\n"


def pressed(engine: Any) -> None:
    engine.set_usage(0.95, running=60, waiting=30)
    engine.serve_requests(5, ttft_s=3.0, gap_s=0.2)


def test_names_of_pins() -> None:
    pin = pinned_by("operator:anna", 7200 * 10**9)
    assert pin == "operator:anna;until=7200"
    assert [has_ended(pin, second * 10**9) for second in (0, 7199, 7200)] == [False, False, True]
    assert (who_of(pin), ends_ns(pin)) == ("operator:anna", 7200 * 10**9)
    assert (who_of("operator:anna"), ends_ns("operator:anna")) == ("operator:anna", None)
    assert not has_ended("operator:x;until=soon", 10**20)
    assert len(pinned_by("operator:" + "x" * 200, 10**18)) <= 64
    for name in ("autotune;until=7200", "startup;until=7200"):
        assert who_of(name) == name, "no name makes a write of somebody else the daemon's"
        assert not is_the_daemons(name, 0)


def test_the_end_of_a_pin_for_people() -> None:
    wall_s = datetime(2026, 11, 30, 15, 6, 10).timestamp()  # noqa: DTZ001 - local, as people read it
    assert [until_text(7200 * 10**9, second * 10**9, wall_s + second) for second in (0, 3600, 7150)] == [
        "until 17:06, for another 2.0 h",
        "until 17:06, for another 60 min",
        "until 17:06, for another 50 s",
    ]
    assert until_text(90000 * 10**9, 0, wall_s) == "until 2026-12-01 16:06, for another 25.0 h"
    assert until_text(999_999_999_999 * 10**9, 0, wall_s).startswith("for another "), "beyond the calendar"
    assert until_text(5, 10**9, wall_s) == "until 15:06, for another 0 s"


def test_a_pin_holds_for_its_time_and_no_longer(make_rig: Any) -> None:
    rig = make_rig(PRESSURE)
    rig.run_s(5, lambda: pressed(rig.engine))
    until_ns = rig.clock.now_ns() + 60 * 10**9
    rig.engine.patch({"kv_format": "int8"}, writer=pinned_by("operator:anna", until_ns), reason="incident 7")
    rig.run_s(59, lambda: pressed(rig.engine))
    assert rig.engine.state.desired["kv_format"] == "int8"
    (text,) = rig.daemon.status()["overrides"].values()
    assert re.match(r"operator:anna until \d\d:\d\d, for another 2 s: incident 7", text)
    (told,) = [row for row in rig.parts.decisions.recent(50) if row.scenario == "override"]
    held = r"set by operator:anna; left alone until \d\d:\d\d, for another 60 s, or until `autotune release kv_format`"
    assert re.fullmatch(held, told.why)
    assert told.writer == "operator:anna"
    assert re.search(rf"by operator:anna\): {held}; incident 7", told.line())
    assert not [tick for tick in rig.ticks() if "until=" in json.dumps(tick.body)]
    rig.run_s(20, lambda: pressed(rig.engine))
    assert rig.engine.state.desired["kv_format"] == "int4"
    assert rig.daemon.status()["overrides"] == {}


def test_a_pin_outlives_the_daemon(make_rig: Any) -> None:
    first = make_rig(PRESSURE)
    first.run_s(2, lambda: pressed(first.engine))
    until_ns = first.clock.now_ns() + 40 * 10**9
    first.engine.patch({"kv_format": "int8"}, writer=pinned_by("operator:anna", until_ns))
    first.close()
    again = make_rig(PRESSURE, engine=first.engine, clock=first.clock)
    again.run_s(39, lambda: pressed(again.engine))
    assert again.engine.state.desired["kv_format"] == "int8"
    again.run_s(15, lambda: pressed(again.engine))
    assert again.engine.state.desired["kv_format"] == "int4"


def test_pin_and_release_on_the_command_line(autotune: Any, fakes: Any, tmp_path: Path) -> None:
    engine = fakes.FakeEngine(RealClock())
    path = ("--control", str(tmp_path / "e.sock"))
    with fakes.FakeControlServer(engine, tmp_path / "e.sock"):
        code, out, _ = autotune("pin", "kv_format=int8", "--for", "2h", "--reason", "incident", *path)
        assert code == 0
        assert out.splitlines()[0] == "kv_format=int8 for 2h, then the daemon may move it again"
        writer = engine.state.writers["kv_format"].writer
        assert writer.startswith("operator:")
        assert not has_ended(writer, RealClock().now_ns() + 7190 * 10**9)
        assert has_ended(writer, RealClock().now_ns() + 7201 * 10**9)
        assert " for another " in autotune("tunables", *path)[1]
        for wrong in ("", "2", "x", "-1h", "0s", "31d", "1e9d", "nan"):
            code, _, err = autotune("pin", "kv_format=int8", "--for", wrong, *path)
            assert (code, len(err.splitlines())) == (2, 1), wrong
        assert autotune("pin", "nosuch=1", "--for", "1h", *path)[0] == 2
        assert engine.state.revision == 1
        autotune("set", "block_size=64", *path)
        code, out, _ = autotune("release", *path)
        assert code == 0
        assert [line.partition(":")[0] for line in out.splitlines()[:-1]] == ["kv_format", "block_size"]
        assert autotune("release", *path)[1].startswith("nothing to give back")


@pytest.fixture
def changed(make_rig: Any, fakes: Any, tmp_path: Path) -> Any:
    """A daemon that has changed kv_format at tick 11, its journal and the engine's control socket."""
    rig = make_rig(PRESSURE)
    rig.run_s(24, lambda: pressed(rig.engine))
    with fakes.FakeControlServer(rig.engine, tmp_path / "e.sock"):
        yield rig, ("--control", str(tmp_path / "e.sock"), "--journal", str(rig.parts.journal.path))


def test_undo_sets_back_what_a_change_replaced_and_keeps_it(changed: Any, autotune: Any) -> None:
    rig, where = changed
    number = next(tick.id for tick in rig.ticks() if tick.body.get("written"))
    code, out, err = autotune("undo", *where)
    assert (code, err) == (0, "")
    done = f"tick {number} undone: kv_format int4 -> native: applied"
    assert out == f"{done}; left alone until: autotune release kv_format\n"
    assert rig.engine.state.writers["kv_format"].reason == f"undo of tick {number}"
    rig.run_s(30, lambda: pressed(rig.engine))
    assert rig.engine.state.desired["kv_format"] == "native"
    who, revision = rig.engine.state.writers["kv_format"].writer, rig.engine.state.revision
    for again in ((), (str(number),), (f"[{number}]",)):
        code, _, err = autotune("undo", *again, *where)
        already = f"tick {number} has been undone already, by {who}: kv_format is native; nothing is changed"
        assert (code, err) == (1, f"error: {already}\n")
    assert rig.engine.state.revision == revision
    rig.engine.patch({"kv_format": "int8"}, writer="operator:anna")
    assert f"kv_format is int8 by now, not int4 as tick {number} left it" in autotune("undo", *where)[2]
    code, _, err = autotune("undo", "1", *where)
    assert (code, err) == (1, "error: tick 1 changed nothing; `autotune decisions` shows what was changed\n")
    assert autotune("undo", "99999", *where)[0] == 1
    assert autotune("undo", "--journal", "/nowhere.db")[0] == 1


def test_explain_tells_the_whole_story(changed: Any, autotune: Any) -> None:
    rig, (_, _, *journal) = changed
    number = next(tick.id for tick in rig.ticks() if tick.body.get("written"))
    code, out, _ = autotune("explain", str(number), *journal)
    assert code == 0
    told = {line.partition(":")[0]: line for line in out.splitlines()}
    assert f"tick {number} at " in out
    assert "kv_usage 0.95" in told["saw"]
    assert "wanted: kv_format=int4 (" in told["wanted"]
    assert told["guard"] == "guard: allowed: kv_format native -> int4"
    assert told["written"] == "written: applied at revision 1"
    assert "ttft_tail_s 3" in told["measured"]
    assert told["outcome"].startswith("outcome: kept: no tail counts against it (")
    assert told["undo"] == f"undo: autotune undo {number} (sets kv_format=native)"
    code, out, _ = autotune("explain", "1", *journal)
    assert code == 0
    assert "guard: warming_up: " in out
    assert "undo" not in out
    document = json.loads(autotune("explain", "1", "--json", *journal)[1])
    assert document["body"]["observation"]["instance"] == "instance-1"
    rig.engine.alive = False
    rig.run_s(3)
    assert "wanted: nothing (engine_gone: " in autotune("explain", str(rig.ticks()[-1].id), *journal)[1]
    code, _, err = autotune("explain", "9999", *journal)
    assert (code, len(err.splitlines()), "no tick 9999" in err) == (1, 1, True)


@pytest.mark.parametrize(("setting", "left"), [("leave", "int4"), ("restore", "native")])
def test_what_is_left_at_exit_is_a_setting(make_rig: Any, setting: str, left: str) -> None:
    rig = make_rig(PRESSURE + f"on_exit: {setting}\n")
    rig.engine.patch({"block_size": 64}, writer="operator:anna")
    rig.run_s(15, lambda: pressed(rig.engine))
    assert rig.engine.state.desired["kv_format"] == "int4"
    rig.loop.stop()
    rig.daemon.run()
    assert rig.engine.state.desired["kv_format"] == left
    assert rig.engine.state.desired["block_size"] == 64
    last = rig.ticks()[-1]
    assert (last.body["scenario"] == "exit") == (setting == "restore")
    assert rig.decisions()[-1] == ("kv_format", left, "applied")


def test_restoring_leaves_alone_what_somebody_has_set_since(make_rig: Any) -> None:
    rig = make_rig(PRESSURE + "on_exit: restore\n")
    rig.run_s(15, lambda: pressed(rig.engine))
    rig.engine.patch({"kv_format": "int8"}, writer="operator:anna")
    rig.run_s(2, lambda: pressed(rig.engine))
    revision = rig.engine.state.revision
    rig.loop.restore_engine()
    assert rig.engine.state.revision == revision
    rig.engine.patch({"kv_format": "int8"}, writer="release:operator:anna")
    rig.run_s(70, lambda: pressed(rig.engine))
    assert rig.engine.state.desired["kv_format"] == "int4"
    rig.loop.restore_engine()
    assert rig.engine.state.desired["kv_format"] == "int8", "a person's value is what the daemon replaced"


def test_restoring_works_after_a_restart_of_the_daemon(make_rig: Any) -> None:
    first = make_rig(PRESSURE + "on_exit: restore\n")
    first.run_s(15, lambda: pressed(first.engine))
    first.close()  # killed: nothing is restored
    assert first.engine.state.desired["kv_format"] == "int4"
    again = make_rig(PRESSURE + "on_exit: restore\n", engine=first.engine, clock=first.clock)
    again.loop.stop()
    again.daemon.run()
    assert again.engine.state.desired["kv_format"] == "native"
