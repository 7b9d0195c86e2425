"""Send a trace open loop: every request at its own time, whether or not earlier ones have been answered."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import Sequence
from dataclasses import dataclass, field

from autotune.replay.client import Client
from autotune.replay.handshake import Server
from autotune.replay.records import Outcome, RequestRecord
from envs.workload.trace import Trace

_TIMER_S = 0.0015  # timers of the event loop are late by up to this, so the rest is waited for by looking
_SPARE_FILES = 64  # descriptors left for everything else in this process


@dataclass
class Progress:
    """What has happened so far; the runner appends, views read. ``total`` requests are going to be sent."""

    total: int
    duration_s: float
    records: list[RequestRecord] = field(default_factory=list)
    now_s: float = 0.0
    sending: bool = True
    stopped: bool = False

    @property
    def in_flight(self) -> Sequence[RequestRecord]:
        return [record for record in self.records if record.outcome is Outcome.PENDING]


async def replay(
    trace: Trace, client: Client, server: Server, progress: Progress, *, stop: asyncio.Event, seed: int
) -> None:
    """Send all of ``trace`` from now on and wait for the answers; fills ``progress``.

    When ``stop`` is set, nothing more is sent, what is in flight is cancelled, and the records so far remain.
    """
    prompts = server.prompts(trace, seed)
    client.start_ns = client.clock.now_ns()
    tasks: set[asyncio.Task[None]] = set()
    try:
        for index, request in enumerate(trace.requests):
            body = server.body(prompts, request, index)  # before its time, so that making it delays nobody
            if await _stopped_before(stop, request.arrival_s - _TIMER_S - client.now_s()):
                progress.stopped = True
                break
            while client.now_s() < request.arrival_s:  # noqa: ASYNC110  # time is what is waited for
                await asyncio.sleep(0)
            record = RequestRecord(index, request.arrival_s, request.prompt_tokens, request.output_tokens)
            progress.records.append(record)
            task = asyncio.create_task(client.stream(record, body, exact_tokens=server.exact_tokens))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        progress.sending = False
        if not progress.stopped:
            progress.stopped = await _first_of(stop, tasks)
    finally:
        progress.sending = False
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
        client.close()
        progress.now_s = client.now_s()
        for record in progress.records:
            if record.outcome is Outcome.PENDING:  # cancelled before it had begun to run
                record.outcome, record.finished_s = Outcome.CANCELLED, progress.now_s


async def _stopped_before(stop: asyncio.Event, delay_s: float) -> bool:
    """Sleep; returns at once, True, when ``stop`` is set. Lets other tasks run even without a delay."""
    if delay_s <= 0:
        await asyncio.sleep(0)
        return stop.is_set()
    try:
        async with asyncio.timeout(delay_s):
            await stop.wait()
    except TimeoutError:
        return stop.is_set()
    return True


async def _first_of(stop: asyncio.Event, tasks: set[asyncio.Task[None]]) -> bool:
    """Wait for all tasks or for ``stop``; returns whether it was the latter."""
    stopping = asyncio.create_task(stop.wait())
    try:
        while tasks and not stop.is_set():
            await asyncio.wait({stopping, *tasks}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
    return stop.is_set() and bool(tasks)


def connection_bound(wanted: int) -> int:
    """At most ``wanted`` connections, or what the limit on open files allows after raising it as far as it goes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = wanted + _SPARE_FILES
    if soft < need:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(need, hard), hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(1, min(wanted, soft - _SPARE_FILES))
