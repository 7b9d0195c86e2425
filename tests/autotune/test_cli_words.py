"""What the command line says where people stumble: orders given twice, things copied, output that goes to a pipe."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from autotune.cli import app
from autotune.journal import Journal
from autotune.journal_file import Tick
from autotune.writers import pinned_by
from engine.clock import RealClock


@pytest.fixture
def socket(fakes: Any, tmp_path: Path) -> Iterator[tuple[Any, str]]:
    engine = fakes.FakeEngine(RealClock())
    with fakes.FakeControlServer(engine, tmp_path / "e.sock"):
        yield engine, str(tmp_path / "e.sock")


def test_tunables_does_not_wrap_where_nobody_reads_it_on_a_terminal(autotune: Any, socket: Any) -> None:
    engine, path = socket
    engine.patch({"block_size": 64}, writer="operator:" + "a" * 55, reason="why " * 80)
    lines = autotune("tunables", "--control", path)[1].splitlines()
    (row,) = [line for line in lines if line.strip().startswith("block_size ")]
    assert "16 32 64 128 256" in row
    assert "a" * 55 in row
    (reason,) = [line for line in lines if line.startswith("block_size, revision 1: why")]
    assert reason.count("why") == 80


def test_release_of_what_is_the_daemons_says_so_and_writes_nothing(autotune: Any, socket: Any) -> None:
    engine, path = socket
    engine.patch({"kv_format": "int8"}, writer="autotune")
    engine.patch({"block_size": 64}, writer="operator:anna")
    engine.patch({"max_num_seqs": 32}, writer=pinned_by("operator:anna", 0))  # and ended
    code, out, _ = autotune("release", "kv_format", "eviction", "max_num_seqs", "--control", path)
    assert (code, engine.state.revision) == (0, 3)
    assert out.splitlines() == [
        f"{knob}: is the daemon's already, nothing to give back" for knob in ("kv_format", "eviction", "max_num_seqs")
    ]
    code, out, _ = autotune("release", "kv_format", "block_size", "--control", path)
    assert code == 0
    assert out.splitlines() == [
        "kv_format: is the daemon's already, nothing to give back",
        "block_size: given back to the daemon, 64 until it moves it",
        "revision 4",
    ]
    assert engine.state.writers["kv_format"].writer == "autotune"


def test_unpin_says_which_of_the_two_it_is(autotune: Any, socket: Any) -> None:
    _, path = socket
    code, _, err = autotune("unpin", "4", "--all", "--control", path)
    assert (code, err) == (
        2,
        "error: --all ends every pin: give it without ids, or leave it out to end only those named\n",
    )
    code, _, err = autotune("unpin", "--control", path)
    assert (code, "name pins by their ids" in err) == (2, True)


def test_decisions_of_an_empty_journal_say_so(autotune: Any, tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    journal = Journal(path, wall_s=lambda: 0.0)
    journal.append(Tick(1, "run", 0.0, 0, False, {}), "loop", {})
    code, out, err = autotune("decisions", "--journal", str(path))
    assert (code, out) == (0, "")
    assert err == f"nothing has been decided yet, by the journal {path}\n"
    journal.close()


def test_a_tick_may_be_given_as_it_is_shown(autotune: Any, tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    journal = Journal(path, wall_s=lambda: 0.0)
    journal.append(Tick(7, "run", 0.0, 0, False, {}), "loop", {})
    assert "tick 7 at" in autotune("explain", "[7]", "--journal", str(path))[1]
    for verb in ("explain", "undo"):
        for wrong in ("0", "x", "[]", "-1", "[7] x", "9" * 400, "²"):
            code, _, err = autotune(verb, "--journal", str(path), "--", wrong)
            assert (code, len(err.splitlines()), "such as 120" in err) == (2, 1, True), (verb, wrong, err)
        code, _, err = autotune(verb, "99999", "--journal", str(path))
        assert code == 1
        assert err.startswith(f"error: journal {path}: no tick 99999 (any more); ")
    journal.close()


def test_check_config_tells_the_rules_faults_with_all_others(autotune: Any, tmp_path: Path) -> None:
    rules, profile, file = tmp_path / "rules.yaml", tmp_path / "no.yaml", tmp_path / "c.yaml"
    rules.write_text("rules: [{name: a, when: load > 1, set: {kv_format: int2}}]\n")
    file.write_text(f"mode: x\npolicy: {{rules: {rules}, profile: {profile}, nosuch: 1}}\ntick_s: -1\n")
    code, out, err = autotune("check-config", str(file))
    assert (code, out) == (1, "")
    told = [line.removeprefix("error: ").partition(":")[0] for line in err.splitlines()]
    assert set(told) == {"mode", "policy.nosuch", "tick_s", "policy.rules", "policy.profile"}
    file.write_text(f"policy: {{rules: {rules}, profile: {profile}}}\n")
    err = autotune("check-config", str(file))[2]
    assert {line.removeprefix("error: ").partition(":")[0] for line in err.splitlines()} == {
        "policy.rules",
        "policy.profile",
    }
    assert len(err.splitlines()) == len(set(err.splitlines()))
    for nothing in ("mode: [\n", "- 1\n", "mode: x\npolicy: 3\n", "mode: x\npolicy: {rules: 3}\n"):
        file.write_text(nothing)
        assert autotune("check-config", str(file))[0] == 1


@pytest.fixture
def watched(make_rig: Any, fakes: Any, tmp_path: Path) -> Iterator[Any]:
    """A daemon with an admin port, and the engine's control socket."""
    rig = make_rig("admin: {port: 0}\n")
    rig.daemon.admin.start()
    with fakes.FakeControlServer(rig.engine, tmp_path / "e.sock"):
        yield rig
    rig.daemon.admin.stop()


def test_status_takes_its_addresses_from_the_configuration(autotune: Any, watched: Any, tmp_path: Path) -> None:
    watched.run_s(2)
    port = watched.daemon.admin.address.rpartition(":")[2]
    file = tmp_path / "status.yaml"
    for host in ("127.0.0.1", "0.0.0.0"):
        file.write_text(f"engine: {{control: {tmp_path / 'e.sock'}}}\nadmin: {{host: {host}, port: {port}}}\n")
        code, out, _ = autotune("status", "--config", str(file))
        assert out.startswith("engine: fake; "), host
        assert "daemon: mode active; engine ok" in out, host
        assert code == 0
    for admin, why in (("{port: 0}", "takes a free port"), ("{enabled: false}", "has no admin port")):
        file.write_text(f"admin: {admin}\n")
        code, _, err = autotune("status", "--config", str(file))
        assert (code, len(err.splitlines()), why in err, "--admin" in err) == (1, 1, True, True)
    file.write_text("nosuch: 1\n")
    assert autotune("status", "--config", str(file))[0] == 1


def test_status_says_what_is_exempt_from_the_budget(autotune: Any, watched: Any, tmp_path: Path) -> None:
    where = ("--control", str(tmp_path / "e.sock"), "--admin", watched.daemon.admin.address)

    def quality() -> str:
        (line,) = [line for line in autotune("status", *where)[1].splitlines() if line.startswith("quality: ")]
        return line

    watched.run_s(2)
    assert "exempt" not in quality()
    watched.engine.patch({"kv_format": "int4", "block_size": 64}, writer="operator:anna")
    watched.run_s(2)
    assert "; exempt from it, as somebody else holds them: kv_format" in quality()
    assert watched.daemon.status()["quality"]["exempt"] == ["kv_format"]
    document = json.loads(autotune("status", "--json", *where)[1])
    assert document["daemon"]["quality"]["exempt"] == ["kv_format"]
    watched.engine.patch({"kv_format": "int4"}, writer="release:operator:anna")
    watched.run_s(2)
    assert "exempt" not in quality()


@pytest.mark.parametrize("uid", ["-1", "4294967295", "root", "9" * 400])
def test_a_user_who_cannot_be_is_refused(autotune: Any, uid: str) -> None:
    code, out, err = autotune("engine", "--model", "m", "--control-uid", uid)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "--control-uid: " in err
    assert "a user is a number from 0 to 4294967294" in err


COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
PLACES = {"--control", "--admin", "--token-file", "--journal"}


def options_of(command: Any) -> set[str]:
    return {name for option in command.params for name in option.opts}


def test_every_command_that_asks_a_running_engine_or_daemon_takes_its_configuration() -> None:
    """One option finds engine, daemon and journal alike, whatever a command needs of them."""
    starts_one = {"run", "engine", "daemon", "fleet"}
    family = {verb: options_of(one) for verb, one in COMMANDS.items() if verb not in starts_one}
    family = {verb: options for verb, options in family.items() if options & PLACES}
    known = "tunables set release pin pins unpin audit status decisions explain undo mode reload doctor".split()
    assert {*known, "replay-decisions", "score-advice"} <= family.keys()
    assert [verb for verb, options in family.items() if "--config" not in options] == []


@pytest.mark.parametrize(
    "arguments",
    [("tunables",), ("set", "block_size=64"), ("pin", "block_size=64", "--for", "2h"), ("release",), ("pins",),
     ("unpin", "--all"), ("audit",)],
)  # fmt: skip
def test_the_configuration_says_where_the_engine_is(
    autotune: Any, socket: Any, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    _, path = socket
    config = tmp_path / "c.yaml"
    config.write_text(f"engine: {{control: {path}}}\n")
    code, out, err = autotune(*arguments, "--config", str(config))
    where = out + err
    assert "no engine listens here" not in where
    if arguments[0] in {"tunables", "set", "pin", "release"}:  # the stand-in has no pins and no books
        assert code == 0, err
    config.write_text("engine: {kind: vllm, url: 'http://127.0.0.1:9'}\n")
    code, _, err = autotune(*arguments, "--config", str(config))
    assert (code, len(err.splitlines())) == (1, 1)
    assert "vllm at http://127.0.0.1:9 has no control socket; autotune status --config" in err


@pytest.mark.parametrize(
    "arguments", [("status",), ("mode", "off"), ("reload",), ("tunables",), ("doctor",), ("replay", "chat-steady")]
)
def test_what_does_not_answer_is_told_in_words(autotune: Any, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """The system's numbers (`[Errno 2]`) stood behind a message that had said it all."""
    (tmp_path / "admin.token").write_text("x" * 32)
    config = tmp_path / "c.yaml"
    config.write_text(
        f"engine: {{control: {tmp_path / 'no.sock'}}}\nadmin: {{port: 9}}\njournal: {{path: {tmp_path / 'j.db'}}}\n"
    )
    where = ("--url", "http://127.0.0.1:9") if arguments[0] == "replay" else ("--config", str(config))
    code, out, err = autotune(*arguments, *where)
    assert code == 1 or arguments[0] == "doctor"
    assert "Errno" not in out + err
    if arguments[0] in {"status", "tunables", "doctor"}:
        assert (
            "no engine listens here; start one with `autotune engine`, or name its socket with --control" in out + err
        )
        assert "No such file" not in out + err
    if arguments[0] in {"status", "mode", "reload"}:
        assert "(Connection refused)" in out + err


@pytest.mark.parametrize(
    "arguments", [("decisions",), ("explain", "3"), ("undo",), ("replay-decisions",), ("score-advice",)]
)
def test_without_a_journal_one_line_says_what_to_give(
    autotune: Any, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    code, out, err = autotune(*arguments, "--journal", str(tmp_path / "none.db"))
    assert (code, out, len(err.splitlines())) == (1, "", 1)
    assert err.rstrip().endswith("none.db: No such file or directory; name the daemon's with --journal or --config")
