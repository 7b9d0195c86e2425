"""The daemon as a process: what it loads, how much memory it takes, what it tells, how it stops."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.clock import RealClock

MAX_RSS_KIB = 80 * 1024
VERB = "from autotune.cli import main; main()"


def test_its_modules_load_no_torch() -> None:
    code = """
import sys
import autotune.cli, autotune.daemon, autotune.wiring, autotune.actuator, autotune.cli.daemon
heavy = {"torch", "stable_baselines3", "transformers", "triton", "numba"} & set(sys.modules)
sys.exit(f"loaded {heavy}" if heavy else 0)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_command_line_itself_loads_next_to_nothing() -> None:
    code = """
import sys
import autotune.cli
heavy = {"torch", "gymnasium", "httpx", "uvicorn", "pydantic", "sqlite3", "prometheus_client"} & set(sys.modules)
sys.exit(f"loaded {heavy}" if heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def running(fakes: Any, tmp_path: Path) -> Iterator[tuple[Any, ...]]:
    """A daemon process over a fake engine, with a fake service manager."""
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(str(tmp_path / "notify"))
    manager.settimeout(60)
    config = tmp_path / "daemon.yaml"
    config.write_text("tick_s: 0.1\nwindow_s: 0.5\nengine: {poll_s: 0.05}\nadmin: {port: 0}\n")
    environment = {
        **os.environ,
        "NOTIFY_SOCKET": str(tmp_path / "notify"),
        "WATCHDOG_USEC": "500000",
        "STATE_DIRECTORY": str(tmp_path),
    }
    environment.pop("WATCHDOG_PID", None)
    engine = fakes.FakeEngine(RealClock())
    with fakes.FakeControlServer(engine, tmp_path / "e.sock"):
        command = [sys.executable, "-c", VERB, "daemon", "--config", str(config), "--control", str(tmp_path / "e.sock")]
        process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        yield process, manager, config, engine
        process.kill()
        process.wait()
        process.stderr.close()
    manager.close()


def until(manager: Any, wanted: Any) -> list[str]:
    """Notifications up to and with the first that starts with ``wanted``."""
    seen = []
    while not (seen and seen[-1].startswith(wanted)):
        seen.append(manager.recv(65536).decode())
    return seen


def test_from_start_to_stop(running: Any) -> None:
    process, manager, config, engine = running
    assert "active; engine ok" in until(manager, "READY=1")[-1]
    address = None
    for line in process.stderr:
        if found := re.search(r"http://127\.0\.0\.1:\d+", line):
            address = found[0]
            break
    until(manager, "WATCHDOG=1")
    status = json.load(urllib.request.urlopen(f"{address}/status", timeout=30))
    assert status["engine"] == "ok"
    assert b"autotune_ticks_total" in urllib.request.urlopen(f"{address}/metrics", timeout=30).read()

    config.write_text("nonsense: 1\n")
    process.send_signal(signal.SIGHUP)
    told = [m for m in until(manager, "READY=1") if not m.startswith(("WATCHDOG", "STATUS"))]
    assert [m.partition("\n")[0] for m in told] == ["RELOADING=1", "READY=1"]
    assert "nonsense: unknown key" in told[-1]

    proc = Path(f"/proc/{process.pid}")
    rss_kib = int(re.search(r"VmRSS:\s+(\d+)", (proc / "status").read_text())[1])
    assert "libtorch" not in (proc / "maps").read_text()
    print(f"daemon RSS {rss_kib / 1024:.1f} MiB")
    assert rss_kib <= MAX_RSS_KIB

    process.send_signal(signal.SIGTERM)
    assert until(manager, "STOPPING=1")
    assert process.wait(60) == 0
    assert engine.state.revision == 0, "stopping changes nothing"
    remains = process.stderr.read()
    assert "Traceback" not in remains


def test_watchdog_pings_go_on_during_a_slow_reload(running: Any) -> None:
    """Case M.47 in a process: the watchdog allows half a second."""
    process, manager, config, _ = running
    until(manager, "READY=1")
    text = config.read_text()
    config.unlink()
    os.mkfifo(config)  # reading the configuration now takes as long as we like
    process.send_signal(signal.SIGHUP)
    until(manager, "RELOADING=1")
    for _ in range(4):
        assert until(manager, "WATCHDOG=1")[-1] == "WATCHDOG=1"
    config.write_text(text + "mode: advise\n")
    assert "applied mode" in until(manager, "READY=1")[-1]
