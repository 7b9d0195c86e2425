"""The daemon beside an engine of another make: it sees the load, advises, and restarts only where it may."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.adapters.restart_file import values_in
from autotune.adapters.restart_work import Work
from autotune.adapters.wire import watched_engine
from autotune.cli.status import _restart_lines
from autotune.config import ConfigError, parse_config
from autotune.overrides import override_actions
from engine.clock import ManualClock

KNOBS = {"kv-cache-dtype": "auto", "block-size": 16}


class Beside:
    """A daemon over a fake vLLM. ``popen`` are the commands that were run; each restarts the fake as the file says."""

    def __init__(self, make_rig: Any, server: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.make_rig, self.server, self.file = make_rig, server, folder / "engine.env"
        self.clock = ManualClock(start_ns=5_000_000_000)
        self.popen: list[list[str]] = []
        outer = self

        class Popen:
            def __init__(self, command: Any, **_: Any) -> None:
                outer.popen.append(list(command))
                text = outer.file.read_text() if outer.file.exists() else None
                outer.server.restart(**{"kv-cache-dtype": "auto", **values_in(text)})

            def poll(self) -> int:
                return 0

        monkeypatch.setattr(subprocess, "Popen", Popen)

    def rig(self, *, allowed: bool = True, **more: Any) -> Any:
        restart = {"allowed": allowed, "file": str(self.file), "commands": [["systemctl", "restart", "vllm"]]}
        restart.update(more.pop("restart", {}))
        config = {
            "engine": {"kind": "vllm", "url": self.server.url},
            "restart": restart,
            "targets": {"ttft_s": 1.0, "tbt_s": 0.1},
            **more,
        }
        control = watched_engine(parse_config(yaml.safe_dump(config)), self.clock)
        return self.make_rig(yaml.safe_dump(config), engine=control, clock=self.clock)

    def press(self) -> None:
        """A second in which memory is full, requests wait, are late and are preempted."""
        one = self.server.figures
        one.running, one.waiting, one.usage = 10, 5, 1.0
        one.preemptions += 1
        one.serve(1, ttft_s=3.0)

    def calm(self) -> None:
        one = self.server.figures
        one.running, one.waiting, one.usage = 0, 0, 0.0


@pytest.fixture
def beside(make_rig: Any, fake_engines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Beside]:
    with fake_engines.FakeServer("vllm", KNOBS) as server:
        yield Beside(make_rig, server, tmp_path, monkeypatch)


def test_the_load_is_seen_within_two_ticks_and_told_to_prometheus(beside: Beside) -> None:
    rig = beside.rig(allowed=False)
    rig.run_s(3)
    beside.press()
    rig.run_s(2)
    status = rig.daemon.status()
    assert status["values"]["running"] == 10
    assert status["values"]["kv_usage"] == 1.0
    assert status["policy"] == "watch-only"
    assert rig.metric("autotune_num_requests_waiting") == 5
    assert rig.metric("autotune_num_preemptions_total") == 1
    assert rig.metric("autotune_kv_read_bytes_total") is None, "unknown is absent, not 0"
    assert rig.metric("autotune_recoded_tokens_total") is None
    observed = rig.ticks()[-1].body["observation"]
    assert observed["tunables"] == {}, "its knobs are not ours"


def test_its_knobs_are_shown_as_ours_are(beside: Beside) -> None:
    rig = beside.rig(allowed=False, admin={"port": 0})
    rig.run_s(3)
    assert rig.metric("autotune_tunable", knob="kv-cache-dtype", value="auto") == 1
    assert rig.metric("autotune_tunable", knob="block-size", value="16") == 1
    assert rig.metric("autotune_override", knob="block-size") == 0
    assert rig.metric("autotune_override", knob="kv_format") is None, "it has no such knob"
    rig.daemon.admin.start()
    try:
        with urllib.request.urlopen(rig.daemon.admin.address + "/dashboard/about", timeout=30) as answer:
            knobs = json.load(answer)["knobs"]
        with urllib.request.urlopen(rig.daemon.admin.address + "/dashboard/data", timeout=30) as answer:
            assert json.load(answer)["status"]["tunables"] == KNOBS
    finally:
        rig.daemon.admin.stop()
    assert knobs.keys() == KNOBS.keys()
    assert knobs["block-size"]["description"]
    assert not any(about["can_be_set"] for about in knobs.values())
    for order, wanted in (("set", {"knob": "block-size", "value": 32}), ("release", {})):
        with pytest.raises(ValueError, match="takes its settings at its start"):
            override_actions(rig.parts)[order](wanted)


def test_without_permission_there_is_advice_and_nothing_is_ever_touched(beside: Beside, tmp_path: Path) -> None:
    rig = beside.rig(allowed=False)
    before = set(tmp_path.iterdir())
    rig.run_s(150, beside.press)
    beside.calm()
    rig.run_s(100)
    assert [(knob, new, verdict) for knob, new, verdict in rig.decisions()] == [("kv-cache-dtype", "fp8", "advised")]
    (record,) = rig.parts.decisions.recent(10)
    assert "would have saved" in record.reason
    assert "estimated" in record.reason
    assert "restart.allowed" in record.why
    assert beside.popen == []
    assert not beside.file.exists()
    assert beside.server.posts == [], "not even a pause"
    assert all(path.name.startswith("journal") for path in set(tmp_path.iterdir()) - before)
    kept = [tick for tick in rig.ticks() if tick.body.get("restarts")]
    assert kept[0].body["restarts"][0]["verdict"] == "advised"


@pytest.mark.parametrize("mode", ["advise", "off"])
def test_permission_alone_is_not_enough_in_another_mode(beside: Beside, mode: str) -> None:
    rig = beside.rig(mode=mode)
    rig.run_s(150, beside.press)
    beside.calm()
    rig.run_s(60)
    assert beside.popen == []
    assert not beside.file.exists()
    assert rig.decisions()[0][2] == ("advised" if mode == "advise" else "off")


def test_with_permission_it_drains_restarts_verifies_and_journals(beside: Beside) -> None:
    rig = beside.rig()
    rig.run_s(150, beside.press)
    assert beside.popen == [], "requests are in hand"
    assert rig.decisions() == [("kv-cache-dtype", "fp8", "draining")]
    assert rig.daemon.status()["restart"]["under_way"] == "draining"
    beside.calm()
    rig.run_s(20)
    assert beside.popen == [["systemctl", "restart", "vllm"]]
    assert beside.server.knobs["kv-cache-dtype"] == "fp8"
    assert rig.decisions() == [("kv-cache-dtype", "fp8", "draining"), ("kv-cache-dtype", "fp8", "applied")]
    acted = [tick for tick in rig.ticks() if tick.body.get("restarts")]
    assert [tick.body["restarts"][0]["verdict"] for tick in acted] == ["draining", "applied"]
    assert acted[0].effect is not None
    assert acted[0].effect["outcome"] == "applied"
    assert acted[0].effect["without_service_s"] > 0
    assert rig.metric(
        "autotune_decisions_total",
        knob="kv-cache-dtype", to="fp8", scenario="restart", writer="autotune", verdict="applied",
    ) == 1.0  # fmt: skip


def test_never_more_often_than_allowed(beside: Beside) -> None:
    rig = beside.rig(restart={"min_interval_s": 1000})
    rig.run_s(150, beside.press)
    beside.calm()
    rig.run_s(20)
    beside.server.restart(**KNOBS)  # somebody put it back
    rig.run_s(200, beside.press)
    beside.calm()
    rig.run_s(60)
    assert len(beside.popen) == 1
    assert rig.decisions()[-1][2] == "rate_limit"
    rig.clock.advance_s(1000)
    rig.run_s(150, beside.press)
    beside.calm()
    rig.run_s(20)
    assert len(beside.popen) == 2


def test_a_price_that_is_not_earned_back_restarts_nothing(beside: Beside) -> None:
    rig = beside.rig(restart={"payback_s": 60, "takes_s": 3000})
    rig.run_s(150, beside.press)
    beside.calm()
    rig.run_s(20)
    assert beside.popen == []
    assert rig.decisions() == [("kv-cache-dtype", "fp8", "not_worth")]
    (record,) = rig.parts.decisions.recent(10)
    assert "a restart costs 3000 s without service (estimated)" in record.reason


def test_permission_that_is_taken_back_while_it_drains_ends_it(beside: Beside) -> None:
    rig = beside.rig()
    rig.run_s(150, beside.press)
    rig.daemon.order_mode("advise")
    rig.run_s(2)
    beside.calm()
    rig.run_s(60)
    assert beside.popen == []
    assert not beside.file.exists()
    assert [verdict for _, _, verdict in rig.decisions()][:2] == ["draining", "not_drained"]


def test_what_was_taken_back_is_not_tried_again(beside: Beside) -> None:
    rig = beside.rig(restart={"min_interval_s": 60})
    monkey = beside.server.restart
    beside.server.restart = lambda **_: monkey(**KNOBS)  # the unit does not read the file
    rig.run_s(150, beside.press)
    beside.calm()
    rig.run_s(60)
    assert len(beside.popen) == 1, "it runs as before already"
    assert rig.decisions()[-1][2] == "rolled_back"
    assert not beside.file.exists()
    rig.run_s(200, beside.press)
    beside.calm()
    rig.run_s(60)
    assert len(beside.popen) == 1
    assert rig.decisions()[-1][2] == "failed_before"


def test_a_daemon_that_is_killed_in_between_sees_it_through(beside: Beside) -> None:
    rig = beside.rig()
    rig.run_s(150, beside.press)
    beside.calm()
    for _ in range(40):
        rig.run_s(0.5)
        if beside.popen:
            break
    assert beside.popen
    kept = rig.parts.journal.recall("restart")
    assert kept["work"]["phase"] == "restarting"
    rig.close()
    again = beside.rig()
    again.daemon.restore()
    again.run_s(20)
    assert again.decisions()[-1] == ("kv-cache-dtype", "fp8", "applied")
    assert len(beside.popen) == 1
    assert again.daemon.status()["restart"]["next_in_s"] > 3000
    assert isinstance(Work.resumed(kept["work"], 0), Work)


def test_several_engines_on_a_page_need_a_name(make_rig: Any, fake_engines: Any) -> None:
    clock = ManualClock(start_ns=5_000_000_000)
    with fake_engines.FakeServer("vllm", KNOBS, engines=("0", "1")) as server:
        server.engines["1"].running = 7
        for label, expected in ((None, None), ("1", 7.0), ("2", None)):
            config = {"engine": {"kind": "vllm", "url": server.url, "label": label}}
            control = watched_engine(parse_config(yaml.safe_dump(config)), clock)
            rig = make_rig(yaml.safe_dump(config), engine=control, clock=clock)
            rig.run_s(3)
            assert rig.daemon.status()["values"]["running"] == expected
            if expected is None:
                assert "engine" in rig.daemon.status()["problem"]
            rig.close()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("engine: {kind: vllm}", "engine.url: where the vllm engine answers"),
        ("engine: {url: 'http://a'}", "engine.url: is for engines of another make"),
        ("engine: {kind: tgi}", "engine.kind"),
        ("engine: {kind: vllm, url: 'http://a'}\nrestart: {allowed: true}", "restart.file"),
        ("engine: {kind: vllm, url: 'http://a'}\nrestart: {allowed: true, file: /a}", "restart.commands"),
        ("restart: {allowed: true, file: /a, commands: [[a]]}", "restart.allowed: our own engine"),
        ("restart: {commands: [[]]}", "restart.commands: every command needs its words"),
    ],
)
def test_configurations_that_make_no_sense_are_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem.replace("(", "\\(")):
        parse_config(text)


def test_an_address_that_is_none_is_a_fault_of_the_configuration() -> None:
    config = parse_config("engine: {kind: vllm, url: nowhere}")
    with pytest.raises(ConfigError, match=r"engine\.url: 'nowhere': must be an address"):
        watched_engine(config, ManualClock())


def test_check_config_says_whether_restarts_are_permitted(autotune: Any, tmp_path: Path) -> None:
    file = tmp_path / "daemon.yaml"
    file.write_text("engine: {kind: vllm, url: 'http://127.0.0.1:1'}\n")
    assert "restart: not permitted; vllm at http://127.0.0.1:1" in autotune("check-config", str(file))[1]
    with file.open("a") as more:
        more.write("restart: {allowed: true, file: /run/a.env, commands: [[systemctl, restart, v]]}\n")
    assert (
        "PERMITTED, at most every 3600 s, writing /run/a.env, by: systemctl restart v"
        in autotune("check-config", str(file))[1]
    )


def test_status_tells_what_is_advised_and_that_the_daemon_alone_watches(beside: Beside, autotune: Any) -> None:
    rig = beside.rig(allowed=False)
    rig.run_s(150, beside.press)
    (line,) = _restart_lines(rig.daemon.status()["restart"])
    assert line.startswith("restart: not permitted; advised: kv-cache-dtype=fp8 (memory-short): memory was short")
    assert _restart_lines(None) == []
    _, out, _ = autotune("status", "--config", str(rig.config_path), "--admin", "http://127.0.0.1:9")
    assert f"engine: vllm at {beside.server.url}, watched by the daemon" in out
