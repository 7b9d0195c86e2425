"""Engine and daemon as child processes in a run folder of their own: commands, configuration, readiness."""

from __future__ import annotations

import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final

import yaml

from autotune.child import ChildSpec
from autotune.demo.run_folder import JOURNAL
from autotune.supervisor import Supervisor
from engine.clock import Clock
from engine.control_client import ControlClient, EngineUnreachable
from engine.paths import MAX_SOCKET_PATH_BYTES

# A daemon that reacts within seconds, since the whole demonstration lasts little over a minute.
WINDOW_S: Final = 4.0
TICK_S: Final = 0.5
DWELL_S: Final = {"step": 1.0, "background": 3.0}

# The verbs in a process of their own, found where this package was found, installed command or not.
VERBS: Final = (sys.executable, "-c", "from autotune.cli import main; main()")


@dataclass(frozen=True)
class EngineSpec:
    """How to start an engine. ``pool_bytes`` None: the engine's own default."""

    model: Path
    device: str = "auto"
    dtype: str = "auto"
    pool_bytes: int | None = None
    extra: tuple[str, ...] = ()
    program: tuple[str, ...] = VERBS


@dataclass(frozen=True)
class Stack:
    """Addresses of one engine and, with tuning, its daemon."""

    folder: Path
    port: int
    admin_port: int | None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def control(self) -> Path:
        return self.folder / "engine.sock"

    @property
    def journal(self) -> Path:
        return self.folder / JOURNAL

    @property
    def decisions_url(self) -> str | None:
        return None if self.admin_port is None else f"http://127.0.0.1:{self.admin_port}/decisions?limit=500"


def new_stack(folder: Path, *, tuned: bool) -> Stack:
    """A fresh folder and free ports. Raises OSError when the folder cannot be made, ValueError for too long a path."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    stack = Stack(folder, free_port(), free_port() if tuned else None)
    if len(str(stack.control).encode()) > MAX_SOCKET_PATH_BYTES:
        raise ValueError(f"{folder}: too long a path for a Unix socket; choose a shorter run folder")
    return stack


def supervisor(
    stack: Stack,
    engine: EngineSpec,
    config: dict[str, Any] | None,
    clock: Clock,
    *,
    report: Callable[[str], None],
) -> Supervisor:
    """The children of a stack, not yet started; what they print goes to log files in the folder."""
    children = [
        ChildSpec(
            "engine",
            engine_command(stack, engine),
            ready=lambda: _engine_answers(stack),
            output=_log(stack.folder / "engine.log"),
        )
    ]
    if stack.admin_port is not None:
        path = stack.folder / "daemon.yaml"
        path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        children.append(
            ChildSpec(
                "daemon",
                (*VERBS, "daemon", "--config", str(path)),
                ready=lambda: _get(stack.decisions_url or "") is not None,
                output=_log(stack.folder / "daemon.log"),
            )
        )
    return Supervisor(children, clock, report=report)


def engine_command(stack: Stack, engine: EngineSpec) -> tuple[str, ...]:
    pool = () if engine.pool_bytes is None else ("--kv-pool-bytes", str(engine.pool_bytes))
    return (
        *(*engine.program, "engine", "--model", str(engine.model)),
        *("--host", "127.0.0.1", "--port", str(stack.port), "--control", str(stack.control)),
        *("--device", engine.device, "--dtype", engine.dtype, *pool, *engine.extra),
    )


def daemon_config(
    stack: Stack, *, ttft_target_s: float, tbt_target_s: float, policy: Mapping[str, Any]
) -> dict[str, Any]:
    """A whole configuration; ``policy``: that section of it."""
    return {
        "mode": "active",
        "window_s": WINDOW_S,
        "tick_s": TICK_S,
        "engine": {"control": str(stack.control), "poll_s": 0.25},
        "targets": {"ttft_s": ttft_target_s, "tbt_s": tbt_target_s},
        "policy": dict(policy),
        "guard": {"dwell_s": DWELL_S},
        "journal": {"path": str(stack.journal)},
        "admin": {"host": "127.0.0.1", "port": stack.admin_port},
    }


def free_port() -> int:
    """A port that was free just now; the engine refuses clearly if it has been taken since."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _engine_answers(stack: Stack) -> bool:
    if _get(f"{stack.url}/health") is None:
        return False
    try:
        with ControlClient(stack.control) as control:
            control.tunables()
    except EngineUnreachable:
        return False
    return True


def _get(url: str) -> bytes | None:
    """The body of a local address, None while nothing answers with success."""
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:  # noqa: S310  # our own loopback address
            return bytes(answer.read())
    except (OSError, HTTPException):
        return None


def _log(path: Path) -> Callable[[str], None]:
    def write(line: str) -> None:
        with path.open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")

    return write
