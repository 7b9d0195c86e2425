"""More of what goes wrong around the daemon: hung engines, death in mid-change, a second daemon, hostile files."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import zipfile
from pathlib import Path
from typing import Any, Never

import pytest
from policy_cards import card, tensors_of

from autotune.actuator import Actuator
from autotune.cli import app
from autotune.cli._shared import fail_with
from autotune.journal_file import read_runs
from autotune.rethinking import Rethinker
from autotune.run_document import in_force, run_document
from autotune.wiring import check_rules, minds_of
from engine.clock import RealClock
from engine.control_client import ControlClient
from envs.port import ApplyResult, ApplyStatus, Change
from policies.export import export_policy

PRESSURE = "policy: {rules: literature, quality_budget: null}\n"


def pressed(engine: Any) -> None:
    engine.set_usage(0.95, running=60, waiting=30)
    engine.serve_requests(5, ttft_s=3.0, gap_s=0.2)


def test_a_hung_engine_is_as_good_as_gone(tmp_path: Path) -> None:
    """It takes connections and never answers: a call ends by its timeout and nothing is written."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(tmp_path / "e.sock"))
        listening.listen(8)
        client = ControlClient(tmp_path / "e.sock", timeout_s=0.05)
        actuator = Actuator(client, mode="active", latest=lambda: None, now_ns=RealClock().now_ns)
        assert actuator.poll() is None
        assert "no answer within 0.05 s" in actuator.last_error
        assert actuator.refresh() is None
        assert actuator.apply(Change("kv_format", "int8")).status is ApplyStatus.LOST
        client.close()


class Killed(BaseException):
    """Stands for kill -9: nothing of the daemon runs after it."""


def test_killed_between_the_write_and_the_journal_nothing_is_written_twice(make_rig: Any) -> None:
    first = make_rig(PRESSURE)
    first.run_s(9, lambda: pressed(first.engine))
    write = first.engine.patch

    def dying(changes: Any, **options: Any) -> Never:
        write(changes, **options)
        raise Killed

    first.engine.patch = dying
    with pytest.raises(Killed):
        first.run_s(10, lambda: pressed(first.engine))
    first.engine.patch = write
    first.close()
    assert first.engine.state.desired["kv_format"] == "int4"
    again = make_rig(PRESSURE, engine=first.engine, clock=first.clock)
    again.daemon.restore()
    again.run_s(1, lambda: pressed(again.engine))
    assert again.daemon.status()["tunables"]["kv_format"] == "int4", "known within one tick"
    assert again.daemon.status()["overrides"] == {}
    again.run_s(60, lambda: pressed(again.engine))
    assert again.engine.state.revision == 1, "the change was made again, or others in a burst"
    ids = [tick.id for tick in again.ticks()]
    assert ids == list(range(1, len(ids) + 1))


@pytest.mark.parametrize("second", range(8, 16))
def test_killed_at_any_second_the_next_one_makes_no_burst(make_rig: Any, second: int) -> None:
    first = make_rig(PRESSURE)
    first.run_s(second, lambda: pressed(first.engine))
    first.close()
    revision = first.engine.state.revision
    again = make_rig(PRESSURE, engine=first.engine, clock=first.clock)
    again.daemon.restore()
    again.run_s(9, lambda: pressed(again.engine))
    assert again.engine.state.revision == revision, "acted on less than one window of its own"
    again.run_s(30, lambda: pressed(again.engine))
    assert again.engine.state.desired["kv_format"] == "int4"
    assert again.engine.state.revision == 1


def test_two_daemons_on_one_engine_both_hold_and_say_so(make_rig: Any, tmp_path: Path) -> None:
    one = make_rig(PRESSURE)
    other = type(one)(tmp_path_of(tmp_path, "other"), PRESSURE, engine=one.engine, clock=one.clock)
    one.run_s(12, lambda: pressed(one.engine))
    assert one.engine.state.desired["kv_format"] == "int4"
    other.run_s(5, lambda: pressed(other.engine))  # what is there at its first look is no offence
    assert "another daemon" not in other.daemon.status()["problem"]
    one.engine.patch({"kv_format": "native"}, writer="autotune", reason="by the other one")
    one.run_s(30, lambda: pressed(one.engine))
    status = one.daemon.status()
    assert status["healthy"] is False
    assert status["problem"].startswith("another daemon writes to this engine (kv_format at revision 2)")
    assert one.engine.state.revision == 2, "it fights"
    assert one.ticks()[-1].body["scenario"] == "other_daemon"
    one.run_s(50, lambda: pressed(one.engine))
    assert one.engine.state.desired["kv_format"] == "int4", "it goes on once the other one is quiet"
    assert one.daemon.status()["healthy"] is True
    other.close()


def tmp_path_of(folder: Path, name: str) -> Path:
    made = folder / name
    made.mkdir()
    return made


def test_its_own_write_without_an_answer_is_no_other_daemon(make_rig: Any) -> None:
    rig = make_rig(PRESSURE)
    rig.run_s(9, lambda: pressed(rig.engine))
    apply = rig.parts.actuator.apply

    def deaf(change: Change) -> ApplyResult:
        rig.parts.actuator.apply = apply
        apply(change)
        return ApplyResult(ApplyStatus.LOST, "no answer")

    rig.parts.actuator.apply = deaf
    rig.run_s(20, lambda: pressed(rig.engine))
    assert rig.engine.state.desired["kv_format"] == "int4"
    assert "other_daemon" not in {tick.body["scenario"] for tick in rig.ticks()}


@pytest.mark.parametrize(
    ("name", "value"),
    [("kv_usage", -1.0), ("running", 2**80), ("waiting", "many"), ("kv_pool_bytes", float("inf")), ("running", None)],
)
def test_hostile_figures_never_end_the_loop(make_rig: Any, name: str, value: Any) -> None:
    rig = make_rig(PRESSURE)
    rig.run_s(12, lambda: pressed(rig.engine))
    revision = rig.engine.state.revision
    setattr(rig.engine.figures.gauges, name, value)
    rig.run_s(5, lambda: rig.engine.serve_requests(1))
    assert rig.loop.ticks == 17
    assert rig.metric("autotune_tick_errors_total") == 0
    assert rig.engine.state.revision == revision
    json.dumps(rig.daemon.status())


KINDS = ("missing", "pickle", "folder of nothing", "archive", "normaliser")


def spoil(folder: Path, marker: Path, kind: str) -> None:
    """What is no policy under the name of one; what runs of it would leave ``marker``."""
    code = f"cos\nsystem\n(S'touch {marker}'\ntR.".encode()
    if kind == "archive":  # as Stable-Baselines3 saves a model, with code in every field that it unpickles
        with zipfile.ZipFile(folder, "w") as archive:
            fields = {"policy_class": {":type:": "x", ":serialized:": base64.b64encode(code).decode()}}
            archive.writestr("data", json.dumps(fields))
            for name in ("policy.pth", "policy.optimizer.pth", "pytorch_variables.pth"):
                archive.writestr(name, code)
    elif kind == "normaliser":
        folder.write_bytes(code)
    elif kind != "missing":
        folder.mkdir()
    if kind == "pickle":
        for file in ("policy.json", "policy.safetensors", "card.json", "weights.safetensors"):
            (folder / file).write_bytes(code)


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_that_cannot_be_used_leaves_the_one_in_force(make_rig: Any, tmp_path: Path, kind: str) -> None:
    rig = make_rig(PRESSURE)
    rig.run_s(3, lambda: pressed(rig.engine))
    folder, marker = tmp_path / "policy", tmp_path / "ran"
    spoil(folder, marker, kind)
    rig.write_config(f"policy: {{use: learned, learned: {folder}}}\n")
    rig.daemon.request_reload()
    rig.run_s(12, lambda: pressed(rig.engine))
    assert rig.daemon.last_reload.rejected[0].startswith("policy.learned: ")
    assert rig.parts.minds.policy.name == "rules:literature"
    assert rig.engine.state.desired["kv_format"] == "int4", "the rules go on deciding"
    assert rig.metric("autotune_policy_refused") == 0
    assert not marker.exists()
    assert fail_with(lambda: app(["check-config", str(rig.config_path)], standalone_mode=False)) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_at_a_start_the_rules_stand_in_for_a_policy_that_cannot_be_used(
    make_rig: Any, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Case L.44: nothing of it runs, the reason is told, and the rules decide."""
    folder, marker = tmp_path / "policy", tmp_path / "ran"
    spoil(folder, marker, kind)
    learned = f"policy: {{use: learned, learned: {folder}, rules: literature, quality_budget: null}}\n"
    rig = make_rig(learned)
    rig.daemon._tell_choice()
    assert [r.levelname for r in caplog.records if "policy.learned: " in r.message] == ["ERROR"]
    document = run_document(in_force(rig.config, rig.parts.minds.policy), check_rules(rig.config))
    rig.parts.journal.start_run(rig.loop.run_id, document)
    rig.run_s(12, lambda: pressed(rig.engine))
    status = rig.daemon.status()
    assert status["policy_refused"].startswith("policy.learned: ")
    assert (status["policy"], status["healthy"]) == ("rules:literature", True)
    assert "in place of a policy that cannot be used" in rig.daemon._line()
    assert rig.metric("autotune_policy_refused") == 1
    assert rig.engine.state.desired["kv_format"] == "int4", "the rules decide"
    assert not marker.exists()
    before = rig.ticks()
    rig.write_config(learned + "tick_s: 2\n")
    assert rig.daemon.reload().rejected[0].startswith("policy.learned: "), "a reload does not make do with less"
    found = Rethinker(read_runs(rig.parts.journal.path), minds_of).replay(before)
    assert (found.same + found.held, found.ticks) == (12, 12), found.lines
    if folder.is_file():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)
    made = card()
    export_policy(folder, made, tensors_of(made.network))
    assert rig.daemon.reload().rejected == []
    rig.run_s(3)
    assert rig.daemon.status()["policy"] == "learned:made-up"
    assert rig.daemon.status()["policy_refused"] == ""
    assert rig.metric("autotune_policy_refused") == 0


def test_a_full_disk_does_not_stop_the_loop(make_rig: Any) -> None:
    rig = make_rig(PRESSURE)
    rig.run_s(5, lambda: pressed(rig.engine))
    connection = rig.parts.journal._connection
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {pages}")
    rig.run_s(10, lambda: pressed(rig.engine))
    assert rig.engine.state.desired["kv_format"] == "int4"
    assert rig.metric("autotune_journal_postponed_writes_total") > 0
    assert "full" in rig.daemon.status()["journal"]["last_error"]
    connection.execute("PRAGMA max_page_count = 1000000")
    rig.run_s(1, lambda: pressed(rig.engine))
    assert [tick.id for tick in rig.ticks()] == list(range(1, 17))
