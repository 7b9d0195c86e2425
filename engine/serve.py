"""Starts an engine: ``python -m engine.serve --model DIR``. No torch before the options are known to be good."""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from engine.clock import RealClock
from engine.errors import EXIT_CONFIGURATION, ConfigurationError, EngineError
from engine.models.folder import check_folder
from engine.paths import default_control_socket
from engine.prefix_pins import DEFAULT_SHARE
from engine.recording import DEFAULT_MAX_BYTES, TrafficRecorder
from engine.sizes import parse_size
from engine.tunables import TUNABLES, Tunable, TunableValues, default_values, parse_change
from kernels.layout import NATIVE_TILE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.assembly import Assembly

DEFAULT_PORT = 8000
_MOST_THREADS = 1024  # OpenMP would start any number, until the machine can take no more
_LONGEST_GRACE_S = 86_400


@dataclass(frozen=True)
class EngineOptions:
    """Everything that is fixed while an engine runs. ``None`` leaves the choice to the engine.

    ``tunables``: values at start that differ from the defaults. ``control_uids``: users besides the engine's own and
    root who may use the control socket; naming any makes the socket 0660. ``grace_s``: how long running requests may
    go on after a signal. ``threads``: processor threads of matrix products and attention. ``protect_layers``: so many
    first layers keep their KV native. ``host_pool_bytes``: host memory for KV, 0 for none; ``host_link_bytes_per_s``:
    rate of the emulated link to it, where the device is no GPU (None: a twentieth of the memory's bandwidth).
    ``quality_table``: refuse formats that cost this model more than
    ``quality_budget_pct`` of perplexity. ``record``: file that gets arrival, lengths and salted prefix hashes of every
    request, see :mod:`engine.recording`.
    """

    model: Path
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    device: str = "auto"
    dtype: str = "auto"
    served_model_name: str | None = None
    kv_pool_bytes: int | None = None
    host_pool_bytes: int = 0
    host_link_bytes_per_s: float | None = None
    control: Path | None = None
    control_uids: tuple[int, ...] = ()
    tunables: TunableValues = field(default_factory=dict)
    max_model_len: int | None = None
    max_waiting: int = 256
    recent_tokens: int = 64
    protect_layers: int = 0
    sinks: int = 16
    watermark: float = 0.01
    prefix_pin_share: float = DEFAULT_SHARE
    recode_budget_tokens: int | None = None
    idle_recode_tokens: int = 2048
    seed: int | None = None
    max_body_bytes: int = 8 << 20
    grace_s: float = 1.0
    threads: int | None = None
    quality_table: Path | None = None
    quality_budget_pct: float = 0.5
    record: Path | None = None
    record_max_bytes: int = DEFAULT_MAX_BYTES

    @property
    def control_path(self) -> Path:
        return self.control or default_control_socket()

    def initial_values(self) -> TunableValues:
        """Every tunable at its value at start. Raises EngineError for an unknown knob or value."""
        try:
            return default_values() | {name: parse_change(name, value) for name, value in self.tunables.items()}
        except ValueError as error:
            raise EngineError(str(error)) from error


def serve(options: EngineOptions) -> None:
    """Run an engine until SIGINT or SIGTERM; main thread only.

    Raises EngineError, one line for people, when it cannot start (ConfigurationError when it never could): nothing is
    left behind then.
    """
    from engine.server.control import ControlSocket  # noqa: PLC0415 - see the module's docstring

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


def check(options: EngineOptions) -> None:
    """Raises ConfigurationError for what can be seen to be wrong without loading anything."""
    try:
        options.initial_values()
        _check_numbers(options)
        check_folder(options.model)
        if options.quality_table is not None:
            from engine.quality.table import read_table  # noqa: PLC0415 - pydantic, which few starts need so early

            read_table(options.quality_table)
    except EngineError as error:
        raise ConfigurationError(str(error)) from error


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


def _check_numbers(options: EngineOptions) -> None:
    """Raises EngineError for a number that no engine could work with. What depends on the model is checked later."""
    limits: tuple[tuple[str, float | None, int, float], ...] = (
        ("--threads", options.threads, 1, _MOST_THREADS),
        ("--max-waiting", options.max_waiting, 1, math.inf),
        ("--protect-layers", options.protect_layers, 0, math.inf),
        ("--recode-budget", options.recode_budget_tokens, 0, math.inf),
        ("--host-link-bytes-per-s", options.host_link_bytes_per_s, 1, math.inf),
        ("--prefix-pin-share", options.prefix_pin_share, 0, 1),
        ("--grace", options.grace_s, 0, _LONGEST_GRACE_S),
        ("--quality-budget", options.quality_budget_pct, 0, math.inf),
    )
    for name, value, least, most in limits:
        # Not a number is outside, too.
        if value is not None and not least <= value <= most:
            allowed = f"at least {least}" if most == math.inf else f"{least} to {most:g}"
            raise EngineError(f"{name} {value:g}: give {allowed}")
    if options.recent_tokens < 0 or options.recent_tokens % NATIVE_TILE_TOKENS:
        raise EngineError(f"--recent-tokens {options.recent_tokens}: give a multiple of {NATIVE_TILE_TOKENS}, or 0")


def _share_processors(threads: int | None) -> None:
    """Set up OpenMP before torch is imported: idle threads sleep instead of spinning.

    Spinning threads take the processor from the server's own thread and from other processes, which makes small matrix
    products many times slower on a busy machine. What the environment already says wins.
    """
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")


def bind_tcp(host: str, port: int) -> socket.socket:
    """A bound, not yet listening TCP socket. Raises EngineError when the address is in use or unknown."""
    if not 0 <= port <= 65535:
        raise EngineError(f"cannot listen on {host}:{port}: ports go from 0 to 65535; choose another with --port")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, OverflowError) as error:
        raise EngineError(f"cannot listen on {host}:{port}: {error}") from error
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
        # Listening now, not after the model is loaded, so that a second engine is refused at once.
        bound.listen(2048)
    except (OSError, OverflowError) as error:
        bound.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise EngineError(f"cannot listen on {host}:{port}: {reason}; choose another with --port") from error
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
            options.control_uids, options.grace_s, AppOptions(max_body_bytes=options.max_body_bytes), recorder
        ),
        # The one line that a person who starts an engine waits for.
        on_ready=lambda: print(f"engine: {ready}", file=sys.stderr, flush=True),  # noqa: T201
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


def parser(program: str = "python -m engine.serve") -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog=program, description="Serve a model over an OpenAI-compatible API, with a KV cache that can be tuned live."
    )
    add = result.add_argument
    add("--model", type=_path, required=True, metavar="DIR", help="model folder: config.json, *.safetensors, tokenizer")
    add("--host", default=EngineOptions.host, help="address to listen on (%(default)s)")
    add("--port", type=int, default=DEFAULT_PORT, help="TCP port; 0 takes a free one (%(default)s)")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (%(default)s)")
    add("--dtype", default="auto", help="auto (as the weights say), float32, bfloat16 or float16 (%(default)s)")
    add("--served-model-name", metavar="NAME", help="name in the API (the folder's name)")
    add("--kv-pool-bytes", type=_size, metavar="N", help="KV pool, like 64M or 2G (a share of free memory)")
    add(
        "--host-pool-bytes",
        type=_size,
        default=0,
        metavar="N",
        help="host memory for KV, used with --set host_offload=on (none)",
    )
    add(
        "--host-link-bytes-per-s",
        type=_size,
        metavar="N",
        help="rate of the emulated link to it, without a GPU (a twentieth of the memory's bandwidth)",
    )
    add("--control", type=_path, metavar="SOCKET", help=f"control socket ({default_control_socket()})")
    add(
        "--control-uid",
        type=int,
        action="append",
        default=[],
        metavar="UID",
        help="one more user who may use the socket; may be repeated",
    )
    add("--max-model-len", type=int, metavar="TOKENS", help="longest sequence (as the model says)")
    add(
        "--max-waiting",
        type=int,
        default=EngineOptions.max_waiting,
        metavar="N",
        help="queue bound; more get 429 (%(default)s)",
    )
    add(
        "--recent-tokens",
        type=int,
        default=EngineOptions.recent_tokens,
        metavar="N",
        help="newest tokens of a sequence that always stay native (%(default)s)",
    )
    add(
        "--protect-layers",
        type=int,
        default=EngineOptions.protect_layers,
        metavar="N",
        help="keep the KV of the first N layers native whatever the kv_format (%(default)s)",
    )
    add(
        "--recode-budget",
        type=int,
        default=EngineOptions.recode_budget_tokens,
        metavar="TOKENS",
        help="KV recoded per step while requests run (what takes 15 %% of a step's time; on a GPU 512)",
    )
    add(
        "--prefix-pin-share",
        type=float,
        default=EngineOptions.prefix_pin_share,
        metavar="SHARE",
        help="most of the KV pool that pinned prefixes may hold (%(default)s)",
    )
    add("--threads", type=int, metavar="N", help="processor threads for computing (one per core)")
    add("--seed", type=int, help="makes sampling without a seed of its own repeatable")
    add(
        "--grace",
        type=float,
        default=EngineOptions.grace_s,
        metavar="S",
        help="seconds that running requests may go on at exit (%(default)s)",
    )
    add(
        "--quality-table",
        type=_path,
        metavar="FILE",
        help="of autotune compare-formats: formats over budget are refused",
    )
    add(
        "--quality-budget",
        type=float,
        default=EngineOptions.quality_budget_pct,
        metavar="PCT",
        help="perplexity that a format may cost by the table, percent (%(default)s)",
    )
    add("--record", type=_path, metavar="FILE", help="write arrival, lengths and salted prefix hashes here, never text")
    add(
        "--record-max",
        type=_size,
        default=DEFAULT_MAX_BYTES,
        metavar="N",
        help="size at which the recording becomes FILE.1 and a new one begins (256M)",
    )
    add(
        "--log-level",
        default="warning",
        choices=("debug", "info", "warning", "error"),
        help="what goes to stderr (%(default)s)",
    )
    add(
        "--set",
        action="append",
        default=[],
        metavar="KNOB=VALUE",
        help="a tunable at start, may be repeated: " + "; ".join(map(_choices, TUNABLES.values())),
    )
    return result


def _choices(tunable: Tunable) -> str:
    return f"{tunable.name}={'|'.join(map(str, tunable.values))}"


def options_from(arguments: argparse.Namespace) -> EngineOptions:
    """Raises ConfigurationError for a tunable that is not ``KNOB=VALUE``."""
    tunables: TunableValues = {}
    for text in arguments.set:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigurationError(f"--set {text}: write KNOB=VALUE")
        tunables[name] = value
    return EngineOptions(
        model=arguments.model,
        host=arguments.host,
        port=arguments.port,
        device=arguments.device,
        dtype=arguments.dtype,
        served_model_name=arguments.served_model_name,
        kv_pool_bytes=arguments.kv_pool_bytes,
        host_pool_bytes=arguments.host_pool_bytes,
        host_link_bytes_per_s=arguments.host_link_bytes_per_s,
        control=arguments.control,
        control_uids=tuple(arguments.control_uid),
        tunables=tunables,
        max_model_len=arguments.max_model_len,
        max_waiting=arguments.max_waiting,
        recent_tokens=arguments.recent_tokens,
        protect_layers=arguments.protect_layers,
        recode_budget_tokens=arguments.recode_budget,
        prefix_pin_share=arguments.prefix_pin_share,
        seed=arguments.seed,
        grace_s=arguments.grace,
        threads=arguments.threads,
        quality_table=arguments.quality_table,
        quality_budget_pct=arguments.quality_budget,
        record=arguments.record,
        record_max_bytes=arguments.record_max,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the command line: 0 after a clean stop; with one line on stderr, 2 when what it was told is wrong and 1
    when the engine cannot start for another reason.
    """
    arguments = parser().parse_args(argv)
    logging.basicConfig(level=arguments.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        serve(options_from(arguments))
    except EngineError as error:
        print(f"engine: {error}", file=sys.stderr)  # noqa: T201 - a command line's error
        return EXIT_CONFIGURATION if isinstance(error, ConfigurationError) else 1
    except KeyboardInterrupt:  # before the signal handlers were in place
        return 130
    return 0


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("the path is empty; name one, or leave the option out")
    return Path(text)


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        # Threads of a step that hangs must not keep the process alive.
        code = main()
        sys.stderr.flush()
        os._exit(code)
