"""Reloads: whole or not at all, told to the service manager in every case, and never the end of later ones."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

PRESSURE = "policy: {rules: literature, quality_budget: null}\n"


@pytest.fixture
def managed(make_rig: Any, tmp_path: Path) -> Iterator[tuple[Any, Callable[[], list[str]]]]:
    """A daemon and the notifications that a service manager got from it since the last look."""
    receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    receiver.bind(str(tmp_path / "notify"))
    receiver.setblocking(False)
    rig = make_rig(PRESSURE)
    rig.daemon.notifier = type(rig.daemon.notifier)(str(tmp_path / "notify"), rig.clock)

    def told() -> list[str]:
        messages = []
        while True:
            try:
                messages.append(receiver.recv(65536).decode())
            except BlockingIOError:
                return messages

    rig.run_s(3)
    told()
    yield rig, told
    receiver.close()


def reload(rig: Any, text: str) -> Any:
    rig.config_path.write_text(text)
    rig.daemon.request_reload()
    rig.run_s(0.5)
    return rig.daemon.last_reload


def test_a_good_reload_is_announced_and_applied(managed: Any) -> None:
    """Case M.47; a slow one is in tests/autotune/test_daemon_process.py."""
    rig, told = managed
    rig.write_config(PRESSURE + "mode: advise\n")
    outcome = reload(rig, rig.config_path.read_text())
    assert outcome.applied == ["mode"]
    assert rig.parts.actuator.mode == "advise"
    messages = told()
    assert messages[0] == f"RELOADING=1\nMONOTONIC_USEC={8_000_000}"
    assert messages[1].startswith("READY=1\nSTATUS=reload: applied mode")


def test_bad_file_leaves_the_old_one_whole_and_a_later_good_one_applies(managed: Any) -> None:
    """Case M.48."""
    rig, told = managed
    good = rig.config_path.read_text()
    for bad in ("mode: [", "mode: off\nnosuch: 1\n", "policy: {rules: /nowhere.yaml}\nmode: off\n", "tick_s: -1\n"):
        outcome = reload(rig, bad)
        assert outcome.rejected
        assert outcome.applied == []
        assert rig.parts.actuator.mode == "active"
        messages = told()
        assert messages[0].startswith("RELOADING=1\nMONOTONIC_USEC=")
        assert messages[1].startswith("READY=1\nSTATUS=reload refused, nothing changed: ")
    assert rig.metric("autotune_reloads_total", outcome="rejected") == 4
    assert reload(rig, good + "mode: advise\n").applied == ["mode"]
    assert rig.parts.actuator.mode == "advise"
    assert rig.metric("autotune_reloads_total", outcome="applied") == 1


def test_unknown_key_is_told_with_its_path(managed: Any) -> None:
    rig, _ = managed
    outcome = reload(rig, rig.config_path.read_text() + "guard: {dwel_s: 3}\n")
    assert any(line.startswith("guard.dwel_s: unknown key") for line in outcome.rejected)
    assert rig.daemon.status()["last_reload"]["rejected"] == outcome.rejected


def test_live_and_restart_only_keys_are_told_apart(managed: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Case M.49."""
    rig, told = managed
    caplog.set_level("INFO")
    rig.write_config(PRESSURE + "tick_s: 2\njournal: {path: /elsewhere.db}\n")
    outcome = reload(rig, rig.config_path.read_text())
    assert outcome.applied == ["tick_s"]
    assert outcome.needs_restart == ["journal.path"]
    assert "needs restart journal.path" in told()[1]
    assert "applied tick_s; needs restart journal.path" in caplog.text
    before = rig.loop.ticks
    rig.run_s(10)
    assert rig.loop.ticks - before == 5


def test_one_file_with_a_live_a_restart_only_and_an_unknown_key_is_refused_whole(
    managed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Case M.49 in one file: the unknown key is told by its path and nothing applied; without it, both others are."""
    rig, told = managed
    caplog.set_level("INFO")
    both = PRESSURE + "tick_s: 2\njournal: {path: /elsewhere.db}\n"
    rig.write_config(both + "guard: {dwel_s: 3}\n")
    outcome = reload(rig, rig.config_path.read_text())
    (line,) = outcome.rejected
    assert line.startswith("guard.dwel_s: unknown key")
    assert (outcome.applied, outcome.needs_restart) == ([], [])
    assert line in told()[1]
    assert line in caplog.text
    assert rig.config.tick_s == rig.daemon._config.tick_s
    rig.write_config(both)
    assert reload(rig, rig.config_path.read_text()).summary() == "reload: applied tick_s; needs restart journal.path"
    assert "applied tick_s; needs restart journal.path" in caplog.text


def test_two_signals_at_once_reload_once(managed: Any) -> None:
    rig, told = managed
    rig.daemon._on_reload(1, None)
    rig.daemon._on_reload(1, None)
    rig.run_s(0.5)
    assert sum(message.startswith("RELOADING") for message in told()) == 1


def test_a_missing_file_and_a_failure_inside_are_refusals(managed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, told = managed
    rig.config_path.unlink()
    rig.daemon.request_reload()
    rig.run_s(0.5)
    assert "No such file" in rig.daemon.last_reload.rejected[0]
    rig.write_config(PRESSURE)
    monkeypatch.setattr("autotune.daemon.guard_of", lambda _: 1 / 0)
    rig.daemon.request_reload()
    rig.run_s(0.5)
    assert "division" in rig.daemon.last_reload.rejected[0]
    assert [m.partition("\n")[0] for m in told() if not m.startswith("STATUS")] == ["RELOADING=1", "READY=1"] * 2


def test_windows_and_policy_state_survive_a_reload_that_does_not_touch_them(managed: Any) -> None:
    rig, _ = managed
    rig.run_s(12, lambda: rig.engine.serve_requests(2))
    env, policy = rig.parts.env, rig.parts.minds.policy
    rig.write_config(PRESSURE + "guard: {dwell_s: {background: 1}}\n")
    reload(rig, rig.config_path.read_text())
    assert rig.parts.env is env
    assert rig.parts.minds.policy is policy
    rig.write_config(PRESSURE + "targets: {ttft_s: 9}\n")
    reload(rig, rig.config_path.read_text())
    assert rig.parts.env is not env
    assert rig.metric("autotune_target_seconds", metric="ttft") is not None


def test_changed_rules_in_the_same_file_are_taken(managed: Any, tmp_path: Path) -> None:
    rig, _ = managed
    rules = tmp_path / "rules.yaml"
    text = "version: 1\nname: mine\nrules: [{name: a, when: load > %s, set: {kv_format: int8}}]\n"
    rules.write_text(text % 0.5)
    rig.write_config(f"policy: {{rules: {rules}, quality_budget: null}}\n")
    assert reload(rig, rig.config_path.read_text()).applied == ["policy.rules"]
    policy = rig.parts.minds.policy
    rules.write_text(text % 0.6)
    assert reload(rig, rig.config_path.read_text()).applied == ["policy.rules (the file's content)"]
    assert rig.parts.minds.policy is not policy
    rules.write_text("rules: [{when: nonsense}]")
    outcome = reload(rig, rig.config_path.read_text())
    assert all(line.startswith("policy.rules: ") for line in outcome.rejected)


def test_changed_content_of_a_policys_file_is_taken(managed: Any, tmp_path: Path) -> None:
    rig, _ = managed
    source = Path(__file__).parents[2] / "envs/profiles/llama3_8b_l4_estimated.yaml"
    profile = tmp_path / "profile.yaml"
    profile.write_text(source.read_text())
    rig.write_config(f"policy: {{use: predictor, profile: {profile}}}\n")
    reload(rig, rig.config_path.read_text())
    policy = rig.parts.minds.policy
    assert reload(rig, rig.config_path.read_text()).summary() == "reload: no change"
    assert rig.parts.minds.policy is policy
    lines = [line for line in source.read_text().splitlines(keepends=True) if not line.startswith("digest:")]
    profile.write_text("".join(lines))
    assert reload(rig, rig.config_path.read_text()).applied == ["policy (the content of its files)"]
    assert rig.parts.minds.policy is not policy
