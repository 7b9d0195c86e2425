"""Engines and daemons of a demonstration, one stack after another: started, used, and stopped whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from rich.console import Console

from autotune.child import SupervisorError
from autotune.demo.sides import Side
from autotune.demo.sizing import SizedLoad
from autotune.demo.stack import EngineSpec, Stack, daemon_config, new_stack, supervisor
from autotune.demo.stopping import Interrupted, Stopping
from autotune.replay.client import Client
from autotune.replay.runner import connection_bound
from autotune.replay.wire import Endpoint
from autotune.supervisor import Supervisor
from autotune.waiting import waiting
from engine.clock import Clock

READY_S = 900.0  # the first start compiles kernels, which takes a slow machine minutes
REQUEST_TIMEOUT_S = 300.0
STARVED = (
    "if this machine has little processor time to spare, stop what runs beside it and start again: "
    "kernels that have been compiled are kept"
)


class Stacks:
    """Each in a folder of its own under ``folder``, numbered from 1. ``report``: gets lines for people."""

    def __init__(
        self, folder: Path, stopping: Stopping, clock: Clock, console: Console, report: Callable[[str], None]
    ) -> None:
        self._folder = folder
        self._stopping = stopping
        self._clock = clock
        self._console = console
        self._report = report
        self._number = 0

    @contextlib.asynccontextmanager
    async def start(
        self, engine: EngineSpec, load: SizedLoad | None = None, one: Side | None = None
    ) -> AsyncIterator[tuple[Stack, Client]]:
        """A running engine, and a daemon when there are a load and a policy to tune it by; both gone afterwards.

        Raises Interrupted, SupervisorError, OSError, ValueError.
        """
        async with self._running(engine, load, one) as stack:
            with contextlib.closing(self._client(stack)) as client:
                yield stack, client

    @contextlib.asynccontextmanager
    async def _running(self, engine: EngineSpec, load: SizedLoad | None, one: Side | None) -> AsyncIterator[Stack]:
        self._number += 1
        stack = new_stack(self._folder / f"{self._number}", tuned=one is not None and one.is_tuned)
        config = None
        if load is not None and one is not None and one.policy is not None:
            config = daemon_config(
                stack,
                ttft_target_s=load.ttft_target_s,
                tbt_target_s=load.tbt_target_s,
                policy=dict(one.policy),
            )
        children = supervisor(stack, engine, config, self._clock, report=self._report)
        stopping = self._stopping
        stopping.running = children
        try:
            stopping.check()
            still = "compiling kernels for this processor" if self._number == 1 else "starting"
            with waiting(self._console, f"  starting the engine{' and the daemon' if config else ''}", f"  {still}"):
                await asyncio.to_thread(_start, children)
            stopping.check()
            yield stack
        except SupervisorError:
            if stopping.event.is_set():
                raise Interrupted from None
            raise
        finally:
            stopping.running = None
            await asyncio.to_thread(children.stop)

    def _client(self, stack: Stack) -> Client:
        return Client(
            Endpoint.parse(stack.url), self._clock, timeout_s=REQUEST_TIMEOUT_S, max_connections=connection_bound(4096)
        )


def _start(children: Supervisor) -> None:
    children.start()
    children.wait_ready(READY_S, STARVED)
