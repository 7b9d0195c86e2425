"""Starts an engine: ``python -m engine.serve --model DIR``. No torch before the options are known to be good."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from engine.arguments import options_from, parser
from engine.clock import RealClock
from engine.errors import EXIT_CONFIGURATION, ConfigurationError, EngineError
from engine.logs import ANNOUNCEMENTS, set_up_logging
from engine.options import EngineOptions, check
from engine.recording import TrafficRecorder
from engine.sdnotify import Notifier, watchdog_interval_s
from engine.text import trouble

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.assembly import Assembly

_SWITCH_INTERVAL_S = 0.0005
_announce = logging.getLogger(ANNOUNCEMENTS)


def serve(options: EngineOptions) -> None:
    """Run an engine until SIGINT or SIGTERM; main thread only.

    Raises EngineError, one line for people, when it cannot start (ConfigurationError when it never could): nothing is
    left behind then.
    """
    from engine.server.control_socket import ControlSocket  # noqa: PLC0415 - see the module's docstring

    # Importing torch takes seconds; the commonest mistakes need not wait for it.
    check(options)
    _share_processors(options.threads)
    listener = bind_tcp(options.host, options.port)
    try:
        control = ControlSocket(options.control_path, mode=0o660 if options.control_uids else 0o600)
        try:
            from engine.assembly import assemble  # noqa: PLC0415 - imports torch

            with _recorder(options) as recorder:
                assembly = assemble(options)
                with _quiet_garbage_collection():
                    asyncio.run(_serve(options, assembly, listener, control.socket, recorder))
        finally:
            control.close()
    finally:
        listener.close()


@contextmanager
def _recorder(options: EngineOptions) -> Iterator[TrafficRecorder | None]:
    """The file is made before the model is loaded, so that a wrong name need not wait for that."""
    if options.record is None:
        yield None
        return
    recorder = TrafficRecorder(options.record, RealClock(), max_bytes=options.record_max_bytes)
    try:
        yield recorder
    finally:
        recorder.close()


def _share_processors(threads: int | None) -> None:
    """Set up OpenMP before torch is imported, so that idle threads sleep instead of spinning, and the interpreter.

    Spinning threads take the processor from the server's own thread and from other processes, which makes small matrix
    products many times slower on a busy machine. What the environment already says wins.
    """
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    # Steps compute without the interpreter's lock. When one needs it back, a server that is busy with clients gives
    # it up only after this long, by default 5 ms: longer than many a step.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


def bind_tcp(host: str, port: int) -> socket.socket:
    """A bound, not yet listening TCP socket. Raises EngineError when the address is in use or unknown."""
    if not 0 <= port <= 65535:
        raise EngineError(f"cannot listen on {host}:{port}: ports go from 0 to 65535; choose another with --port")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, OverflowError, UnicodeError) as error:  # UnicodeError: no host has such a name
        raise EngineError(f"cannot listen on {host:.100}:{port}: {trouble(error)}") from error
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
        # Listening now, not after the model is loaded, so that a second engine is refused at once.
        bound.listen(2048)
    except (OSError, OverflowError) as error:
        bound.close()
        raise EngineError(f"cannot listen on {host}:{port}: {trouble(error)}; choose another with --port") from error
    return bound


async def _serve(
    options: EngineOptions,
    assembly: Assembly,
    listener: socket.socket,
    control: socket.socket,
    recorder: TrafficRecorder | None,
) -> None:
    from engine.server.app import AppOptions  # noqa: PLC0415 - only a running engine needs a server
    from engine.server.run import ServerOptions, run_servers  # noqa: PLC0415

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    ready = f"{assembly.served.name} on http://{shown}:{port}, control {options.control_path}, {assembly.summary}"
    await run_servers(
        assembly.core,
        assembly.served,
        assembly.clock,
        listener,
        control,
        stop,
        ServerOptions(
            options.control_uids,
            options.grace_s,
            AppOptions(max_body_bytes=options.max_body_bytes),
            recorder,
            options.stall_s,
            watchdog_interval_s(os.environ, os.getpid()),
            assembly.about,
        ),
        notifier=Notifier.from_environment(os.environ, assembly.clock),
        # The one line that a person who starts an engine waits for.
        on_ready=lambda: _announce.info("%s", ready),
    )


@contextmanager
def _quiet_garbage_collection() -> Iterator[None]:
    """Keep the model's and libraries' objects out of every later collection: a full one takes tens of milliseconds in
    the middle of a step.
    """
    import gc  # noqa: PLC0415

    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the command line: 0 after a clean stop; with one line on stderr, 2 when what it was told is wrong and 1
    when the engine cannot start for another reason.
    """
    arguments = parser().parse_args(argv)
    set_up_logging(arguments.log_level, arguments.log_format, os.environ)
    try:
        serve(options_from(arguments))
    except EngineError as error:
        print(f"engine: {error}", file=sys.stderr)  # noqa: T201 - a command line's error
        return EXIT_CONFIGURATION if isinstance(error, ConfigurationError) else 1
    except KeyboardInterrupt:  # before the signal handlers were in place
        return 130
    return 0


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        # Threads of a step that hangs must not keep the process alive.
        code = main()
        sys.stderr.flush()
        os._exit(code)
