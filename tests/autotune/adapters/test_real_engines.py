"""The daemon beside a real llama.cpp server and a real vLLM: load seen, advice given, one permitted restart made.

``AUTOTUNE_LLAMA_SERVER`` and ``AUTOTUNE_VLLM`` name the programs, ``AUTOTUNE_LLAMA_MODEL`` and ``AUTOTUNE_VLLM_MODEL``
a GGUF file and a folder; `make bench-peers` builds and installs all but the last, for which the bundled model will do.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from waiting import until

from autotune.adapters.find import adapter_of
from autotune.journal_file import read_ticks
from engine.clock import RealClock

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Kind:
    """An engine to be started: by which words, and what the daemon should make of it."""

    name: str
    program: str
    model: str
    before: dict[str, Any]
    after: dict[str, Any]
    clients: int = 6

    def command(self, port: int) -> list[str]:
        at = ["--host", "127.0.0.1", "--port", str(port)]
        if self.name == "llamacpp":
            slots = ["-np", "2", "-c", "1024", "-t", "1", "-fa", "on"]
            return [self.program, "-m", self.model, "-a", "tiny", "--metrics", *slots, *at]
        # A pool of 512 tokens, in which two or three of the six clients have room.
        small = ["--max-model-len", "256", "--block-size", "32", "--num-gpu-blocks-override", "16", "--enforce-eager"]
        return [self.program, "serve", self.model, "--served-model-name", "tiny", "--dtype", "bfloat16", *small, *at]


F16, Q8 = ({f"cache-type-{part}": value for part in "kv"} for value in ("f16", "q8_0"))
KINDS = (
    Kind(
        "llamacpp",
        os.environ.get("AUTOTUNE_LLAMA_SERVER", ""),
        os.environ.get("AUTOTUNE_LLAMA_MODEL", ""),
        {**F16, "parallel": 2},
        {**Q8, "parallel": 3},
        clients=3,
    ),
    Kind(
        "vllm",
        os.environ.get("AUTOTUNE_VLLM", ""),
        os.environ.get("AUTOTUNE_VLLM_MODEL", ""),
        {"kv-cache-dtype": "auto", "block-size": 32},
        {"kv-cache-dtype": "fp8", "block-size": 32},
    ),
)
VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
# What a `systemctl restart` is here: says so to whoever holds the server, and waits until it has been started again.
RESTART = """
import socket, sys
with socket.socket(socket.AF_UNIX) as it:
    it.connect(sys.argv[1])
    sys.exit(0 if it.recv(2) == b"ok" else 1)
"""


def free_port() -> int:
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        return int(it.getsockname()[1])


class Service:
    """Holds a server and starts it anew, with the variables of its environment file, whenever it is asked to."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        self.kind = kind
        self.port, self.file, self.door = free_port(), folder / "engine.env", folder / "door"
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = (folder / "server.log").open("ab")
        self.starts = 0
        self._start()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.door))
        self._listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _start(self) -> None:
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        given = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
        arguments = given.pop("AUTOTUNE_ENGINE_ARGS", "").split()
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [*self.kind.command(self.port), *arguments]
        self.process = subprocess.Popen(
            command, stdout=self.log, stderr=self.log, env={**environment, **VARIABLES, **given}
        )
        self.starts += 1

    def _serve(self) -> None:
        while True:
            try:
                asked, _ = self._listener.accept()
            except OSError:
                return
            with asked:
                self.end()
                self._start()
                asked.sendall(b"ok")

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def close(self) -> None:
        self._listener.close()
        self.end()
        self.log.close()


class Clients:
    """Each asks again as soon as it is answered: more than there is memory for, and what there would be after."""

    def __init__(self, service: Service) -> None:
        self.url, self.answered, self.failed = service.url, 0, list[str]()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(service.kind.clients)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        while not self._stop.is_set():
            wanted = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": True}
            request = urllib.request.Request(
                f"{self.url}/v1/completions",
                data=json.dumps(wanted).encode(),
                headers={"Content-Type": "application/json"},
            )
            try:
                with urllib.request.urlopen(request, timeout=120) as answer:
                    answer.read()
                self.answered += 1
            except OSError as error:
                self.failed.append(str(error))

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)


class Daemon:
    """A real daemon process beside a service."""

    def __init__(self, folder: Path, service: Service, *, allowed: bool) -> None:
        self.port, self.journal = free_port(), folder / "journal.db"
        config = {
            "window_s": 5,
            "long_window_s": 10,
            "engine": {"kind": service.kind.name, "url": service.url},
            "restart": {
                "allowed": allowed,
                "file": str(service.file),
                "commands": [[sys.executable, "-c", RESTART, str(service.door)]],
                "takes_s": 5,
                "ready_s": 300,
                "watch_s": 60,
            },
            "journal": {"path": str(self.journal)},
            "admin": {"port": self.port},
        }
        file = folder / "daemon.yaml"
        file.write_text(yaml.safe_dump(config))
        self.log = (folder / "daemon.log").open("ab")
        command = [sys.executable, "-m", "autotune", "daemon", "--config", str(file)]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)

    def status(self) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/status", timeout=5) as answer:
                return dict(json.load(answer))
        except OSError:
            return {}

    def verdicts(self) -> list[str]:
        ticks = read_ticks(self.journal, limit=100_000)
        return [row["verdict"] for tick in ticks for row in tick.body.get("restarts", ())]

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        self.log.close()


@pytest.fixture(params=KINDS, ids=[kind.name for kind in KINDS])
def service(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Service]:
    kind: Kind = request.param
    if not (kind.program and kind.model):
        pytest.skip(f"no program and model of {kind.name} are named in the environment")
    found = Service(kind, tmp_path)
    adapter = adapter_of(kind.name, found.url, RealClock())
    until(adapter.healthy, f"{kind.name} to load", 300)
    yield found
    found.close()


def knobs(service: Service) -> dict[str, Any]:
    (reading,) = adapter_of("auto", service.url, RealClock()).read().values()
    return dict(reading.effective)


def test_with_permission_one_restart_is_carried_out_and_verified(service: Service, tmp_path: Path) -> None:
    assert knobs(service) == service.kind.before
    daemon = Daemon(tmp_path, service, allowed=True)
    try:
        until(lambda: daemon.status().get("engine") == "ok", "the daemon to see the engine")
        clients = Clients(service)
        began = daemon.status()["tick"]
        until(lambda: (daemon.status().get("values") or {}).get("running"), "the load to be seen")
        seen_after = daemon.status()["tick"] - began
        until(lambda: "draining" in daemon.verdicts(), "a restart to be begun", 240)
        clients.stop()
        until(lambda: {"applied", "rolled_back", "failed"} & set(daemon.verdicts()), "its end", 400)
        effect = next(tick.effect for tick in read_ticks(daemon.journal, limit=100_000) if tick.effect)
        print(f"load seen after {seen_after} ticks; {clients.answered} requests answered, none lost; {effect}")
        assert daemon.verdicts()[-1] == "applied"
        assert service.starts == 2
        assert knobs(service) == service.kind.after
        assert clients.failed == []
        assert seen_after <= 2
    finally:
        daemon.close()


def test_without_permission_nothing_is_restarted(service: Service, tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, service, allowed=False)
    try:
        clients = Clients(service)
        until(lambda: daemon.journal.exists() and "advised" in daemon.verdicts(), "advice", 240)
        clients.stop()
        # The daemon has ticked beside an idle engine for a while by then.
        tick = daemon.status()["tick"]
        until(lambda: daemon.status().get("tick", 0) > tick + 20, "twenty idle ticks", 120)
        assert set(daemon.verdicts()) == {"advised"}
        assert service.starts == 1
        assert not service.file.exists()
        assert clients.failed == []
    finally:
        daemon.close()
