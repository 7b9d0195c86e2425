"""``autotune run``: engine and daemon together under one parent, or the demonstration of both."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from autotune.cli._shared import CliError, ControlOption, given_path


def register(app: typer.Typer) -> None:
    app.command(
        "run", short_help="Engine and daemon together, or a demo.", context_settings={"ignore_unknown_options": False}
    )(run)


def run(
    *,
    demo: Annotated[
        bool, typer.Option("--demo", help="Demonstrate tuning on a bursty load (default: no --model).")
    ] = False,
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Model folder; the bundled one if absent.", parser=given_path)
    ] = None,
    host: Annotated[str, typer.Option(help="Address of the engine's API.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the engine's API.")] = 8000,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    kv_pool_bytes: Annotated[str | None, typer.Option(metavar="N", help="KV pool, like 64M or 2G.")] = None,
    control: ControlOption = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The daemon's configuration.", parser=given_path)
    ] = None,
    pairs: Annotated[int, typer.Option(min=1, help="Demonstration: replays with and without tuning.")] = 1,
    duration: Annotated[float, typer.Option(min=1, help="Demonstration: seconds of load per replay.")] = 90.0,
    workload: Annotated[str, typer.Option(help="Demonstration: built-in workload.")] = "reasoning-bursty",
    rules: Annotated[str, typer.Option(help="Demonstration: preset or rules file.")] = "default",
    against: Annotated[
        str | None, typer.Option(metavar="RULES", help="Demonstration: compare with these rules, not with no daemon.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Demonstration: seed of the load.")] = 1,
    run_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Demonstration: keep logs and journals here.", parser=given_path)
    ] = None,
) -> int:
    """Run engine and daemon on a model until Ctrl-C; without --model, demonstrate them on the bundled one.

    The demonstration measures this machine, sizes a KV pool and a load that a native cache cannot carry, replays the
    load with the daemon on and off, and ends with one line of JSON.
    """
    if demo or model is None:
        return _demonstrate(
            model, device=device, dtype=dtype, pairs=pairs, duration_s=duration, workload=workload, rules=rules,
            against=against, seed=seed, run_dir=run_dir,
        )  # fmt: skip
    return _serve(
        model, host=host, port=port, device=device, dtype=dtype, kv_pool_bytes=kv_pool_bytes, control=control,
        config=config,
    )  # fmt: skip


def _demonstrate(
    model: Path | None,
    *,
    device: str,
    dtype: str,
    pairs: int,
    duration_s: float,
    workload: str,
    rules: str,
    against: str | None,
    seed: int,
    run_dir: Path | None,
) -> int:
    from rich.console import Console  # noqa: PLC0415  # slow imports, and not for --help

    from autotune.demo.run import DemoError, DemoOptions, bundled_model, run_demo  # noqa: PLC0415
    from engine.clock import RealClock  # noqa: PLC0415
    from envs.workload.catalogue import CATALOGUE  # noqa: PLC0415

    if workload not in CATALOGUE:
        raise CliError(f"--workload {workload!r} is not built in; choose one of {', '.join(CATALOGUE)}", 2)
    options = DemoOptions(
        model=model or bundled_model(),
        device=device,
        dtype=dtype,
        pairs=pairs,
        duration_s=duration_s,
        workload=workload,
        rules=rules,
        against=against,
        seed=seed,
        run_folder=run_dir,
    )
    try:
        return run_demo(options, RealClock(), Console(highlight=False))
    except DemoError as error:
        raise CliError(str(error)) from None


def _serve(
    model: Path,
    *,
    host: str,
    port: int,
    device: str,
    dtype: str,
    kv_pool_bytes: str | None,
    control: Path | None,
    config: Path | None,
) -> int:
    from autotune.demo.stack import VERBS  # noqa: PLC0415
    from autotune.supervisor import ChildSpec, Supervisor, SupervisorError  # noqa: PLC0415
    from engine.clock import RealClock  # noqa: PLC0415
    from engine.paths import default_control_socket  # noqa: PLC0415

    socket = control or default_control_socket()
    pool = () if kv_pool_bytes is None else ("--kv-pool-bytes", kv_pool_bytes)
    engine = (
        *(*VERBS, "engine", "--model", str(model), "--host", host, "--port", str(port)),
        *("--control", str(socket), "--device", device, "--dtype", dtype, *pool),
    )
    daemon = (*VERBS, "daemon", "--control", str(socket), *(() if config is None else ("--config", str(config))))
    children = Supervisor(
        [
            ChildSpec("engine", engine, ready=lambda: _answers(socket), output=typer.echo),
            ChildSpec("daemon", daemon, output=typer.echo),
        ],
        RealClock(),
        report=lambda line: typer.echo(line, err=True),
    )
    ended = threading.Event()
    signals: list[int] = []

    def interrupt(number: int, _frame: FrameType | None) -> None:
        signals.append(number)
        ended.set()
        children.request_stop()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    try:
        children.start()
        children.wait_ready(_READY_S)
        ended.wait()
    except SupervisorError as error:
        if not ended.is_set():
            raise CliError(str(error)) from None
    finally:
        children.stop()
    # A service manager's SIGTERM is the normal end of a service.
    return 0 if signals and signals[0] == signal.SIGTERM else 130


_READY_S = 600.0  # large weights on a slow disk


def _answers(socket: Path) -> bool:
    from engine.control_client import ControlClient, EngineUnreachable  # noqa: PLC0415

    try:
        with ControlClient(socket, timeout_s=1.0) as client:
            client.tunables()
    except EngineUnreachable:
        return False
    return True
