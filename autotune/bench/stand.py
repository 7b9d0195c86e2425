"""An engine on a model and its daemon, in a folder of their own, for rows to watch and to kill."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Self

import yaml

from autotune.bench.context import Context
from autotune.bench.processes import Child
from autotune.demo.stack import VERBS, EngineSpec, engine_command, new_stack
from autotune.journal_file import JournalError, Tick, read_ticks
from engine.control_client import ControlClient, EngineUnreachable
from engine.stats import EngineStats

_READY_S: Final = 600.0  # the first start compiles kernels
_LOOK_S: Final = 0.05
_PATIENCE_S: Final = 30.0  # with an engine that is loading, or starved by what else the machine does


class StandError(Exception):
    """Engine or daemon did not come up, in one line."""


class Stand:
    """Use it in ``with``: everything is stopped in the end.

    ``config``: of the daemon, without addresses. ``daemon_socket``: where the daemon finds the engine, if not at the
    engine's own socket.
    """

    def __init__(
        self,
        context: Context,
        name: str,
        config: Mapping[str, Any],
        *,
        pool_bytes: int | None = None,
        extra: tuple[str, ...] = (),
        daemon_socket: str | None = None,
    ) -> None:
        self.stack = new_stack(context.place(name), tuned=True)
        folder = self.stack.folder
        self.journal = folder / "journal.db"
        self.config_path = folder / "daemon.yaml"
        document = {
            **config,
            "engine": {**config.get("engine", {}), "control": daemon_socket or str(self.stack.control)},
            "journal": {**config.get("journal", {}), "path": str(self.journal)},
            "admin": {"host": "127.0.0.1", "port": self.stack.admin_port},
        }
        self.config_path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
        spec = EngineSpec(context.model, pool_bytes=pool_bytes, extra=extra)
        self.engine = Child("engine", engine_command(self.stack, spec), folder / "engine.log")
        daemon = (*VERBS, "daemon", "--config", str(self.config_path))
        self.daemon = Child("daemon", daemon, folder / "daemon.log")
        self._context = context
        self._control = ControlClient(self.stack.control, timeout_s=_PATIENCE_S)

    def __enter__(self) -> Self:
        try:
            self.engine.start()
            self.await_engine()
            self.daemon.start()
            self.wait(lambda: self.status() is not None, "the daemon's status", self.daemon)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.daemon.stop()
        self.engine.stop()
        self._control.close()

    def wait(self, is_so: Callable[[], bool], what: str, child: Child | None = None, limit_s: float = _READY_S) -> None:
        """Look until it is so. Raises StandError after ``limit_s``, or when ``child`` has ended."""
        deadline_ns = self._context.clock.now_ns() + round(limit_s * 1e9)
        while not is_so():
            if child is not None and not child.is_alive:
                raise StandError(f"{child.name} ended: {child.last_words()}")
            if self._context.clock.now_ns() > deadline_ns:
                raise StandError(f"waited {limit_s:g} s in vain for {what}")
            time.sleep(_LOOK_S)

    def sleep(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds))

    def await_engine(self) -> int:
        """Wait until both of its ports answer; returns when that was seen, nanoseconds of the monotonic clock."""
        self.wait(lambda: self.stats() is not None and self.get(f"{self.stack.url}/health") is not None, "the engine",
                  self.engine)  # fmt: skip
        return self._context.clock.now_ns()

    def stats(self) -> EngineStats | None:
        """The engine's own word, past the daemon."""
        try:
            return self._control.stats()
        except EngineUnreachable:
            return None

    @property
    def control(self) -> ControlClient:
        return self._control

    def status(self) -> dict[str, Any] | None:
        """The daemon's status, None while it does not answer."""
        text = self.get(f"http://127.0.0.1:{self.stack.admin_port}/status")
        return None if text is None else dict(json.loads(text))

    def metrics(self) -> str:
        """The daemon's page of metrics; empty while it does not answer."""
        return (self.get(f"http://127.0.0.1:{self.stack.admin_port}/metrics") or b"").decode()

    def ticks(self, after_id: int = 0) -> list[Tick]:
        """What the journal holds beyond a tick."""
        try:
            return read_ticks(self.journal, limit=1_000_000, after_id=after_id)
        except JournalError:  # not made yet
            return []

    @staticmethod
    def get(url: str) -> bytes | None:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310  # our own loopback address
                return bytes(answer.read())
        except (OSError, urllib.error.URLError):
            return None


def folder_bytes(journal: Path) -> int:
    """A journal with what belongs to it."""
    return sum(path.stat().st_size for path in journal.parent.glob(f"{journal.name}*") if path.is_file())
