"""Run the recording proxy until a signal."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from autotune.proxy.app import RecordingProxy, upstream_client
from autotune.replay.wire import Endpoint
from engine.clock import Clock
from engine.recording import TrafficRecorder

_CLOSE_S = 2  # for answers under way, once told to stop


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: it would raise the signal again before the recording is closed."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve_proxy(
    target: Endpoint,
    listener: socket.socket,
    recorder: TrafficRecorder,
    clock: Clock,
    *,
    on_ready: Callable[[], None],
) -> None:
    """Serve on a listening socket until SIGINT or SIGTERM. The recorder is the caller's to close."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with upstream_client() as client:
        app = RecordingProxy(target, client, recorder, clock)
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            date_header=False,
            timeout_graceful_shutdown=_CLOSE_S,
        )
        server = _Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        stopping = asyncio.create_task(stop.wait())
        on_ready()
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        server.should_exit = True
        await serving
