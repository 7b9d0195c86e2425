"""Several engines behind Ray Serve, each with a daemon of its own: growth past one machine rests on Ray.

    serve run engines:app model=/models/llama replicas=2

Every replica of the deployment is a process that Ray places on some machine. It starts one engine and one daemon there,
as they would run without Ray, and passes requests on to its engine. Ray needs nothing of kv-autotune: the two are
started by the command ``KV_AUTOTUNE`` (default: ``autotune``), which may live in another virtual environment.

A replica that dies takes its engine and daemon with it (they watch their parent) and Ray starts another one; a replica
whose engine dies says so to Ray's health check, which replaces it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

_START_S = 1800.0  # an engine's first start compiles kernels
_STOP_S = 20.0
_PARENT = "AUTOTUNE_SUPERVISOR_PID"  # our programs end with the process that this names
_HOP = {"host", "connection", "content-length", "transfer-encoding", "keep-alive"}


def free_port() -> int:
    """A TCP port of this machine that nobody has now."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


class Pair:
    """One engine and one daemon, in a folder of their own below ``/tmp``: a socket's path must be short."""

    def __init__(self, model: str, engine_options: list[str], daemon_config: dict[str, Any]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kva-"))
        self.port, self.admin_port = free_port(), free_port()
        program = shlex.split(os.environ.get("KV_AUTOTUNE", "autotune"))
        control = self.folder / "engine.sock"
        config = self.folder / "autotune.yaml"  # JSON is YAML
        config.write_text(json.dumps({**daemon_config, "admin": {"port": self.admin_port}}))
        environment = {**os.environ, _PARENT: str(os.getpid()), "STATE_DIRECTORY": str(self.folder)}
        where = ["--host", "127.0.0.1", "--port", str(self.port), "--control", str(control)]
        commands = {
            "engine": [*program, "engine", "--model", model, *where, *engine_options],
            "daemon": [*program, "daemon", "--config", str(config), "--control", str(control)],
        }
        self._children = {}
        for name, command in commands.items():
            with (self.folder / f"{name}.log").open("wb") as log:
                self._children[name] = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
                )

    def pids(self) -> dict[str, int]:
        return {name: child.pid for name, child in self._children.items()}

    def check(self) -> None:
        """Raises RuntimeError when one of the two has ended, with its last words."""
        for name, child in self._children.items():
            if child.poll() is not None:
                words = (self.folder / f"{name}.log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"the {name} ended with code {child.returncode}: {words}")

    def stop(self) -> None:
        """End both, the daemon first, and remove what they wrote."""
        for child in reversed(self._children.values()):
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signal.SIGTERM)
        for child in self._children.values():
            try:
                child.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                child.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


@serve.deployment(
    max_ongoing_requests=256,  # the engine has a queue of its own, and its daemon wants to see it
    health_check_period_s=2,
    health_check_timeout_s=30,
    graceful_shutdown_timeout_s=60,
)
class Engine:
    """A replica: passes what it is asked on to its engine, streams as they come."""

    def __init__(self, model: str, engine_options: list[str], daemon_config: dict[str, Any]) -> None:
        self.pair = Pair(model, engine_options, daemon_config)
        self.client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.pair.port}", timeout=None)  # noqa: S113  # answers last as long as they last
        self._journal = (self.pair.folder / "requests.log").open("a", buffering=1)
        self._number = 0
        self._wait()

    def _wait(self) -> None:
        """Return once the engine serves. Raises RuntimeError if it ends before or never does."""
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            self.pair.check()
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{self.pair.port}/health", timeout=5).status_code == 200:
                    return
            time.sleep(0.1)
        raise RuntimeError("the engine does not begin to serve")

    async def __call__(self, request: Request) -> Response:
        if request.url.path == "/replica":
            return JSONResponse(self.about())
        self._number += 1
        number, name = self._number, request.headers.get("x-request-id", "")
        self._journal.write(f"begin {number} {name}\n")
        try:
            headers = {key: value for key, value in request.headers.items() if key.lower() not in _HOP}
            sent = self.client.build_request(
                request.method,
                request.url.path,
                params=request.query_params,
                headers=headers,
                content=await request.body(),
            )
            answer = await self.client.send(sent, stream=True)
        except BaseException:
            self._journal.write(f"end {number} {name}\n")
            raise
        kept = {key: value for key, value in answer.headers.items() if key.lower() not in _HOP}
        body = self._body(answer, number, name)
        return StreamingResponse(body, answer.status_code, {**kept, "x-replica": str(os.getpid())})

    async def _body(self, answer: httpx.Response, number: int, name: str) -> AsyncIterator[bytes]:
        try:
            async for part in answer.aiter_raw():
                yield part
        finally:
            self._journal.write(f"end {number} {name}\n")
            await asyncio.shield(answer.aclose())

    def about(self) -> dict[str, Any]:
        """Where this replica's engine and daemon are, for who watches them (a Prometheus, ``autotune status``)."""
        return {
            "pid": os.getpid(),
            "folder": str(self.pair.folder),
            "engine_port": self.pair.port,
            "admin_port": self.pair.admin_port,
            "control": str(self.pair.folder / "engine.sock"),
            "children": self.pair.pids(),
        }

    def check_health(self) -> None:
        """Ray asks; raising has it replace this replica."""
        self.pair.check()

    def __del__(self) -> None:
        if hasattr(self, "pair"):
            self.pair.stop()


def app(arguments: dict[str, str]) -> serve.Application:
    """For ``serve run engines:app model=DIR``. ``replicas``; ``gpus`` and ``cpus`` of each; ``engine``: more options of
    ``autotune engine``; ``daemon``: configuration of the daemon as JSON.
    """
    resources = {"num_cpus": float(arguments.get("cpus", "1")), "num_gpus": float(arguments.get("gpus", "0"))}
    deployment = Engine.options(num_replicas=int(arguments.get("replicas", "2")), ray_actor_options=resources)
    options, config = shlex.split(arguments.get("engine", "")), json.loads(arguments.get("daemon", "{}"))
    return deployment.bind(arguments["model"], options, config)
