"""The command line against a real control socket: output for people, errors of one line, exit codes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.journal import Journal
from autotune.journal_file import Tick
from engine.clock import RealClock


@pytest.fixture
def socket(fakes: Any, tmp_path: Path) -> Iterator[tuple[Any, str]]:
    engine = fakes.FakeEngine(RealClock())
    with fakes.FakeControlServer(engine, tmp_path / "e.sock"):
        yield engine, str(tmp_path / "e.sock")


def test_tunables_for_people_and_machines(autotune: Any, socket: Any) -> None:
    engine, path = socket
    engine.patch({"kv_format": "int8"}, writer="operator:anna", reason="[bold]why\x1b[31m")
    code, out, _ = autotune("tunables", "--control", path)
    assert code == 0
    assert "operator:anna" in out
    assert "[bold]why" in out
    assert "\x1b[31m" not in out
    assert "revision 1" in out
    code, out, _ = autotune("tunables", "--json", "--control", path)
    assert json.loads(out)["desired"]["kv_format"] == "int8"


def test_set_writes_as_the_operator_and_release_gives_back(autotune: Any, socket: Any) -> None:
    engine, path = socket
    code, out, _ = autotune(
        "set", "kv_format=int8", "block_size=64", "--reason", "trying", "--control", path, "--if-revision", "0"
    )
    assert code == 0
    assert "kv_format=int8: applied" in out
    assert engine.state.desired["block_size"] == 64
    assert engine.state.writers["kv_format"].writer.startswith("operator:")
    assert engine.state.writers["kv_format"].reason == "trying"
    code, _, _ = autotune("release", "kv_format", "--control", path)
    assert code == 0
    assert engine.state.writers["kv_format"].writer.startswith("release:operator:")
    assert engine.state.desired["kv_format"] == "int8"


def test_set_with_anything_wrong_changes_nothing(autotune: Any, socket: Any) -> None:
    engine, path = socket
    code, _, err = autotune("set", "kv_format=int8", "block_size=17", "nosuch=1", "plain", "--control", path)
    assert code == 2
    lines = err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("error: ") for line in lines)
    assert "16, 32, 64, 128, 256" in lines[0]
    assert engine.state.revision == 0
    code, _, err = autotune("set", "kv_format=int8", "--if-revision", "9", "--control", path)
    assert code == 1
    assert err == ("error: kv_format=int8: conflict, the revision is 0 by now, not 9; look again before a change\n")
    assert engine.state.revision == 0
    code, _, err = autotune("set", "kv_format=int8", "--reason", "\udcff", "--control", path)
    assert (code, err) == (1, "error: --reason must be text in UTF-8\n")
    assert engine.state.revision == 0


def test_pins_are_shown_and_ended(autotune: Any, fakes: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "p.sock")
    with fakes.FakeControlServer(fakes.FakeEngine(RealClock()), tmp_path / "p.sock") as server:
        row = {"request_id": "cmpl\x1b[31m", "num_tokens": 32, "bytes": 1 << 20, "ttl_s": 60.0, "expires_in_s": 42.4}
        server.pins = [{"id": number, **row} for number in (3, 4, 5)]
        code, out, _ = autotune("pins", "--control", path)
        assert code == 0
        assert "3: 32 tokens, 1.00 MiB, ends in 42 s" in out
        assert "\x1b" not in out
        assert out.endswith("3 pins hold 0.01 MiB, at most 1.00 MiB\n")
        assert json.loads(autotune("pins", "--json", "--control", path)[1])["pins"][0]["id"] == 3
        assert autotune("unpin", "3", "5", "--control", path)[1] == "2 ended\n"
        assert autotune("pins", "--control", path)[1].endswith("1 pin holds 0.00 MiB, at most 1.00 MiB\n")
        assert autotune("unpin", "3", "--control", path)[::2] == (1, "error: no pin\n")
        assert autotune("unpin", "--control", path)[0] == 2
        assert autotune("unpin", "4", "--all", "--control", path)[0] == 2
        assert autotune("unpin", "--all", "--control", path)[1] == "1 ended\n"


@pytest.mark.parametrize("verb", [("tunables",), ("set", "kv_format=int8"), ("release", "kv_format"), ("pins",)])
def test_without_an_engine_it_is_one_line(autotune: Any, tmp_path: Path, verb: Any) -> None:
    code, out, err = autotune(*verb, "--control", str(tmp_path / "none.sock"))
    assert code == 1
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("error: ")


def test_status_without_a_daemon(autotune: Any, socket: Any) -> None:
    _, path = socket
    code, out, _ = autotune("status", "--control", path, "--admin", "http://127.0.0.1:9")
    assert code == 1
    assert out.splitlines()[0].startswith("engine: fake; 8 running")
    assert "no daemon answers" in out
    code, out, _ = autotune("status", "--json", "--control", path, "--admin", "http://127.0.0.1:9")
    assert json.loads(out)["engine"]["model"] == "fake"
    assert autotune("status", "--admin", "file:///etc/passwd")[0] == 2


def test_status_tells_of_the_host_tier_where_there_is_one(autotune: Any, socket: Any) -> None:
    engine, path = socket
    command = ("status", "--control", path, "--admin", "http://127.0.0.1:9")
    assert not any(line.startswith("host:") for line in autotune(*command)[1].splitlines())
    gauges = {"pool_bytes": 8 << 30, "used_bytes": 1 << 20, "cached_bytes": 3 << 29}
    for name, value in (gauges | {"link_bytes_per_s": 20e9, "link_is_emulated": True}).items():
        setattr(engine.figures.gauges, f"host_{name}", value)
    engine.figures.gauges.parked, counters = 1, engine.figures.counters
    counters.host_hit_tokens, counters.swapped_in = 320, 2
    counters.host_out_bytes, counters.host_streamed_bytes = 5 << 20, 7 << 20
    (line,) = [line for line in autotune(*command)[1].splitlines() if line.startswith("host:")]
    assert line == (
        "host:   1.0 MiB held by requests and 1.5 GiB cached of 8.0 GiB; 1 request parked, 0 loading; "
        "320 prompt tokens found there; 2 preempted requests resumed from it; "
        "5.0 MiB copied out, 0 B back, 7.0 MiB streamed; emulated link of 18.6 GiB/s"
    )


@pytest.mark.parametrize(
    "arguments",
    [("nosuch",), ("set",), ("daemon", "--nosuch"), ("engine",), ("engine", "--model"), ("engine", "--port", "x")],
)
def test_wrong_usage_is_one_line_and_code_2(autotune: Any, arguments: Any) -> None:
    code, out, err = autotune(*arguments)
    assert code == 2
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("error: ")


@pytest.mark.parametrize(
    "arguments",
    [
        ("engine", "--model", "m", "--record", ""),
        ("engine", "--model", "m", "--quality-table", ""),
        ("engine", "--model", ""),
        ("run", "--config", ""),
        ("compare-formats", "m", "--out", ""),
        ("record-proxy", "--target", "http://127.0.0.1:9", "--record="),
        ("status", "--control", ""),
    ],
)
def test_an_empty_path_is_not_the_current_folder(autotune: Any, arguments: Any) -> None:
    code, out, err = autotune(*arguments)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "the path is empty" in err


def test_help_is_everywhere(autotune: Any) -> None:
    code, out, _ = autotune()
    assert code == 0
    assert "Commands:" in out
    for verb in ("engine", "daemon", "tunables", "set", "release", "status", "decisions", "check-config"):
        assert verb in out
        if verb != "engine":  # its help exits by itself
            assert autotune(verb, "--help")[0] == 0
    with pytest.raises(SystemExit):
        autotune("engine", "--help")


def test_check_config(autotune: Any, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("mode: advise\n")
    code, out, _ = autotune("check-config", str(good))
    assert code == 0
    assert "by figures that are estimated, published ones" in out
    off = tmp_path / "off.yaml"
    off.write_text("policy: {quality_budget: null}\n")
    assert "no quality budget is kept" in autotune("check-config", str(off))[1]
    bad.write_text("mode: x\nnosuch: 1\n")
    code, out, err = autotune("check-config", str(bad))
    assert code == 1
    assert out == ""
    assert [line.split(":")[1].strip() for line in err.splitlines()] == ["mode", "nosuch"]
    bad.write_text("policy: {rules: nosuch}\n")
    code, _, err = autotune("check-config", str(bad))
    assert code == 1
    assert err.startswith("error: policy.rules: ")
    assert autotune("check-config", str(tmp_path / "none.yaml"))[0] == 1


def test_a_daemon_that_cannot_start_says_why_in_one_line(autotune: Any, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("journal: {path: /proc/nowhere/journal.db}\n")
    for arguments in (("--config", str(file)), ("--config", str(tmp_path / "no.yaml")), ("--log-level", "loud")):
        code, _, err = autotune("daemon", *arguments)
        assert code in {1, 2}
        assert len(err.splitlines()) == 1, err


def test_decisions_without_a_journal_say_what_is_missing(autotune: Any, tmp_path: Path) -> None:
    code, _, err = autotune("decisions", "--journal", str(tmp_path / "none.db"))
    assert code == 1
    assert "none.db: No such file or directory; name the daemon's with --journal or --config" in err


def test_decisions_out_of_the_journal(autotune: Any, tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    journal = Journal(path, wall_s=lambda: 0.0)
    row = {
        "tick": 1,
        "wall_s": 0.0,
        "knob": "kv_format",
        "old": "native",
        "new": "int8",
        "scenario": "memory",
        "reason": "kv_usage 0.93",
        "writer": "autotune",
        "verdict": "applied",
        "why": "",
        "effect": None,
    }
    journal.append(Tick(1, "run", 0.0, 0, True, {"decision": row}), "loop", {})
    journal.append(Tick(2, "run", 0.0, 0, False, {}), "loop", {})
    override = {**row, "tick": 3, "writer": "operator:anna", "reason": "mine", "scenario": "override"}
    journal.append(Tick(3, "run", 0.0, 0, True, {"overrides_begun": [override]}), "loop", {})
    journal.set_effect(1, {"before": {"ttft_tail_s": 2.0}, "after": {"ttft_tail_s": 0.5}, "together_with": [3]})
    code, out, _ = autotune("decisions", "--journal", str(path))
    assert code == 0
    lines = out.splitlines()
    assert len(lines) == 3
    assert "kv_format native -> int8: applied (memory, by autotune) kv_usage 0.93" in lines[0]
    assert "TTFT tail 2 -> 0.5 s" in lines[1]
    assert "together with 3" in lines[1]
    assert "operator:anna" in lines[2]
    code, out, _ = autotune("decisions", "--json", "-n", "1", "--journal", str(path))
    assert json.loads(out)["writer"] == "operator:anna"
    journal.close()
