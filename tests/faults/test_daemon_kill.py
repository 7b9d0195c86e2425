"""A real daemon process, killed with SIGKILL while the engine takes its change; and the one that comes after it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from waiting import until

from autotune.journal_file import JournalError, Tick, read_ticks
from engine.clock import RealClock

VERB = "from autotune.cli import main; main()"
CONFIG = (
    "tick_s: 0.1\nwindow_s: 1\nengine: {poll_s: 0.05}\nadmin: {enabled: false}\n"
    "policy: {rules: literature, quality_budget: null}\n"
)


def ticks(path: Path) -> list[Tick]:
    try:
        return read_ticks(path, limit=10_000)
    except JournalError:  # not made yet
        return []


def test_killed_in_mid_change_the_next_one_knows_the_state_and_makes_no_burst(fakes: Any, tmp_path: Path) -> None:
    config, journal = tmp_path / "daemon.yaml", tmp_path / "journal.db"
    config.write_text(CONFIG)
    engine = fakes.FakeEngine(RealClock())
    engine.set_usage(0.95, running=60, waiting=30)
    running: list[subprocess.Popen[bytes]] = []
    write = engine.patch

    def dying(changes: Any, **options: Any) -> Any:
        answer = write(changes, **options)
        os.kill(running[-1].pid, signal.SIGKILL)  # before it hears of it
        return answer

    engine.patch = dying
    command = [sys.executable, "-c", VERB, "daemon", "--config", str(config), "--control", str(tmp_path / "e.sock")]
    environment = {**os.environ, "STATE_DIRECTORY": str(tmp_path)}
    with fakes.FakeControlServer(engine, tmp_path / "e.sock"):
        try:
            running.append(subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL))
            assert running[-1].wait(60) == -signal.SIGKILL
            assert engine.state.desired["kv_format"] == "int4"
            engine.patch = write
            before = ticks(journal)
            assert not any(tick.body.get("written") for tick in before), "the change itself was not journalled"
            running.append(subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL))
            until(lambda: len(ticks(journal)) >= len(before) + 8, "ticks of the second daemon")
            after = ticks(journal)
            first = after[len(before)]
            assert first.run != before[-1].run
            assert first.body["observation"]["tunables"]["kv_format"] == "int4"
            assert first.body["writers"]["kv_format"][0] == "autotune"
            assert [tick.id for tick in after] == list(range(1, len(after) + 1))
            assert engine.state.revision == 1
        finally:
            for process in running:
                process.kill()
                process.wait()
