"""One whole replay, from learning the server to the summary; shared by ``autotune replay`` and the demonstration."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

from rich.console import Console

from autotune.replay.client import Client
from autotune.replay.handshake import Server
from autotune.replay.runner import Progress, replay
from autotune.replay.summary import Summary, Targets, summarise
from autotune.replay.view import watch
from envs.workload.trace import Trace

_TICK_S = 0.05


@dataclass(frozen=True)
class Result:
    summary: Summary
    progress: Progress


async def run_session(
    trace: Trace,
    client: Client,
    server: Server,
    targets: Targets,
    *,
    stop: asyncio.Event,
    seed: int,
    console: Console | None,
    title: str,
) -> Result:
    """Replay the trace and summarise it; with a console, show it meanwhile. Does not raise when stopped early."""
    progress = Progress(len(trace.requests), trace.duration_s)
    beside = [asyncio.create_task(_follow_time(progress, client))]
    if console is not None:
        beside.append(asyncio.create_task(watch(progress, targets, console, title)))
    try:
        await replay(trace, client, server, progress, stop=stop, seed=seed)
    finally:
        for task in beside:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*beside, return_exceptions=True)
    return Result(summarise(progress.records, targets, partial=progress.stopped), progress)


async def _follow_time(progress: Progress, client: Client) -> None:
    while True:
        progress.now_s = client.now_s()
        await asyncio.sleep(_TICK_S)
