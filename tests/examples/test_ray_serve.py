"""The Ray Serve example: two replicas with two daemons under load, one replica killed.

Needs ray[serve] (extra ``serve``), and a minute: ``pytest -m slow tests/examples``.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from waiting import until

ray = pytest.importorskip("ray", reason="ray is not installed (pip install 'kv-autotune[serve]')")
serve = pytest.importorskip("ray.serve", reason="ray serve is not installed (pip install 'kv-autotune[serve]')")

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "engine" / "bundled" / "model"
PORT = 18_431
URL = f"http://127.0.0.1:{PORT}"
REQUESTS = 240
AT_ONCE = 12

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("KV_AUTOTUNE", os.environ.get("KV_AUTOTUNE", f"{sys.executable} -m autotune"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "examples" / "ray_serve")]))
    monkeypatch.setenv("RAY_SERVE_LOG_TO_STDERR", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "ray_serve"))
    import engines

    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=200 << 20, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": PORT})
        arguments = {
            "model": str(MODEL),
            "replicas": "2",
            "engine": "--kv-pool-bytes 32M --threads 1",
            "daemon": json.dumps({"window_s": 2, "long_window_s": 4, "tick_s": 0.5}),
        }
        serve.run(engines.app(arguments), name="engines", route_prefix="/")
        yield
    finally:
        serve.shutdown()
        ray.shutdown()


def replicas() -> dict[int, dict[str, Any]]:
    """Those that answer, by process: asked often enough to meet every one."""
    found = {}
    for _ in range(40):
        answer = httpx.get(f"{URL}/replica", timeout=30)
        if answer.status_code == 200:
            about = answer.json()
            found[about["pid"]] = about
    return found


def ask(number: int) -> tuple[str, int, str]:
    """One streamed completion: its name, its status (0: the connection broke) and which replica it was on."""
    name, replica = f"load-{number}", ""
    body = {"model": "model", "prompt": f"request {number}: " + "one two three " * 20, "max_tokens": 96, "stream": True}
    try:
        with httpx.stream("POST", f"{URL}/v1/completions", json=body, headers={"x-request-id": name}, timeout=120) as r:
            replica = r.headers.get("x-replica", "")
            text = "".join(r.iter_text())
            return name, r.status_code if "[DONE]" in text or r.status_code != 200 else 0, replica
    except httpx.HTTPError:
        return name, 0, replica


def in_flight(folder: Path) -> set[str]:
    """Requests that a replica had begun and not ended."""
    open_: dict[str, str] = {}
    for line in (folder / "requests.log").read_text().splitlines():
        word, number, *name = line.split(maxsplit=2)
        if word == "begin":
            open_[number] = name[0] if name else ""
        else:
            open_.pop(number, None)
    return set(open_.values())


@pytest.mark.usefixtures("service")
def test_a_killed_replica_loses_no_request_but_those_on_it() -> None:
    both = replicas()
    assert len(both) == 2
    for about in both.values():
        status = httpx.get(f"http://127.0.0.1:{about['admin_port']}/status", timeout=10).json()
        assert status["mode"] == "active"
    victim, other = both.values()
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        asked = [pool.submit(ask, number) for number in range(REQUESTS)]
        until(lambda: sum(future.done() for future in asked) > REQUESTS // 4, "the first answers", limit_s=120)
        until(lambda: len(in_flight(Path(victim["folder"]))) > 1, "requests on the victim", limit_s=60)
        os.kill(victim["pid"], signal.SIGKILL)
        results = [future.result() for future in asked]
    lost = {name for name, status, _ in results if status != 200}
    on_it = in_flight(Path(victim["folder"]))
    print(f"{len(results)} requests, {len(lost)} lost, {len(on_it)} were on the killed replica")
    assert lost <= on_it
    assert {replica for _, status, replica in results if status == 200} >= {str(victim["pid"]), str(other["pid"])}
    for pid in victim["children"].values():  # its engine and daemon went with it
        until(lambda pid=pid: not Path(f"/proc/{pid}/cmdline").exists() or not _command(pid), f"the end of {pid}")
    until(lambda: len(set(replicas()) - {victim["pid"]}) == 2, "another replica", limit_s=300)
    statuses = [
        httpx.get(f"http://127.0.0.1:{about['admin_port']}/status", timeout=10).json() for about in replicas().values()
    ]
    assert all(status["engine"] == "ok" for status in statuses)
    shutil.rmtree(victim["folder"])  # nobody else does: its logs are left for whoever looks


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
