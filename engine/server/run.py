"""Runs both servers over one engine core until told to stop."""

from __future__ import annotations

import asyncio
import logging
import socket
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry

from engine.clock import Clock
from engine.core import EngineCore
from engine.metrics import EngineMetrics
from engine.recording import TrafficRecorder
from engine.sdnotify import Notifier
from engine.server.app import Api, AppOptions
from engine.server.bridge import STALL_S, AsyncEngine
from engine.server.control import control_app
from engine.server.control_socket import allowed_uids, peer_checked_protocol
from engine.server.intake import ServedModel

_KEEP_ALIVE_S = 75
# After the engine has ended every request, their last bytes need this long at most.
_CLOSE_S = 2
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerOptions:
    """``grace_s``: how long running requests may go on once told to stop. ``recorder``: see :class:`Api`; it is the
    caller's to close. ``stall_s``: see :class:`AsyncEngine`. ``watchdog_s``: seconds between two pings to the service
    manager, None when it expects none. ``about``: version and device, for who asks on the control socket.
    """

    control_uids: Collection[int] = ()
    grace_s: float = 1.0
    app: AppOptions = field(default_factory=AppOptions)
    recorder: TrafficRecorder | None = None
    stall_s: float = STALL_S
    watchdog_s: float | None = None
    about: Mapping[str, str] = field(default_factory=dict)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: one place decides how the whole engine stops."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def run_servers(
    core: EngineCore,
    served: ServedModel,
    clock: Clock,
    listener: socket.socket,
    control: socket.socket,
    stop: asyncio.Event,
    options: ServerOptions | None = None,
    *,
    on_ready: Callable[[], None] = lambda: None,
    notifier: Notifier | None = None,
) -> None:
    """Serve on two listening sockets, which are closed in the end, until ``stop`` is set or a server fails.

    ``notifier``: is told when the engine is ready and stops; pings come from this event loop, and only while steps end.
    """
    options, notifier = options or ServerOptions(), notifier or Notifier(None, clock)
    engine = AsyncEngine(core, clock, options.stall_s)
    metrics = EngineMetrics(CollectorRegistry())
    api = Api(
        engine, served, metrics, clock, new_id=lambda: uuid.uuid4().hex, options=options.app, recorder=options.recorder
    )
    common: dict[str, Any] = {
        "log_config": None,
        "access_log": False,
        "lifespan": "off",
        "ws": "none",
        "timeout_keep_alive": _KEEP_ALIVE_S,
        "timeout_graceful_shutdown": _CLOSE_S,
    }
    protocol = peer_checked_protocol(allowed_uids(options.control_uids))
    servers = [
        (_Server(uvicorn.Config(api.app(), **common)), listener),
        (_Server(uvicorn.Config(control_app(engine, options.about), http=protocol, **common)), control),
    ]
    engine.start()
    tasks = [asyncio.create_task(server.serve(sockets=[bound])) for server, bound in servers]
    stopping = asyncio.create_task(stop.wait())
    on_ready()
    notifier.ready(f"serving {served.name}")
    pinging = asyncio.create_task(_ping(notifier, engine, options.watchdog_s))
    await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
    pinging.cancel()
    stopping.cancel()
    notifier.stopping("ending running requests")
    if not await engine.stop(options.grace_s):
        _log.error("a step has not ended in time; leaving it behind")
    for server, _ in servers:
        server.should_exit = True
    await asyncio.gather(*tasks)


async def _ping(notifier: Notifier, engine: AsyncEngine, interval_s: float | None) -> None:
    """Ping as long as both this loop and the engine's turn. A frozen engine is told once, with the reason."""
    told: str | None = None
    while interval_s is not None:
        reason = engine.unavailable_because
        if reason is None:
            notifier.watchdog()
        if reason != told:
            notifier.status(reason or "serving")
            told = reason
        await asyncio.sleep(interval_s)
