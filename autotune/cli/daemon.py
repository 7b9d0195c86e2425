"""``autotune daemon``: tune a running engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli._shared import CliError, ControlOption, given_path
from engine.logs import FORMATS, LEVELS, set_up_logging

if TYPE_CHECKING:
    from autotune.daemon import Daemon


def register(app: typer.Typer) -> None:
    app.command("daemon", short_help="Watch an engine and tune it.")(daemon)


def daemon(
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="YAML configuration; defaults without one.", parser=given_path),
    ] = None,
    control: ControlOption = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    log_format: Annotated[str, typer.Option(help="json, human, or auto: JSON lines unless on a terminal.")] = "auto",
) -> None:
    """Watch an engine and tune it until stopped. SIGHUP reloads the configuration; the engine outlives the daemon."""
    from autotune.supervisor import die_with_parent  # noqa: PLC0415

    for option, given, known in (("--log-level", log_level, LEVELS), ("--log-format", log_format, FORMATS)):
        if given not in known:
            raise CliError(f"{option} {given}: choose one of {', '.join(known)}", 2)
    die_with_parent(os.environ)
    set_up_logging(log_level, log_format, os.environ)
    process = _build(config, control)
    process.install_signal_handlers()
    process.run()


def _build(config_path: Path | None, control: Path | None) -> Daemon:
    from prometheus_client import CollectorRegistry, disable_created_metrics  # noqa: PLC0415

    from autotune.adapters.wire import watched_engine  # noqa: PLC0415
    from autotune.admin import AdminError  # noqa: PLC0415
    from autotune.admin_token import TokenError  # noqa: PLC0415
    from autotune.config import Config, ConfigError, load_config  # noqa: PLC0415
    from autotune.daemon import Daemon, Surroundings  # noqa: PLC0415
    from autotune.journal_file import JournalError  # noqa: PLC0415
    from autotune.ticker import PipeWaiter  # noqa: PLC0415
    from autotune.wiring import build_parts, check_rules, control_socket  # noqa: PLC0415
    from engine.clock import RealClock  # noqa: PLC0415
    from engine.control_client import ControlClient  # noqa: PLC0415

    disable_created_metrics()  # type: ignore[no-untyped-call]  # they double the series and tell what nobody asks
    try:
        config = Config() if config_path is None else load_config(config_path)
        rules = check_rules(config)
        clock, registry = RealClock(), CollectorRegistry()
        socket = control_socket(config, control, os.environ)
        watched = watched_engine(config, clock)
        parts = build_parts(
            config,
            rules,
            control=watched or ControlClient(socket, timeout_s=config.engine.timeout_s),
            clock=clock,
            waiter=PipeWaiter(clock),
            registry=registry,
            environment=os.environ,
        )
        around = Surroundings(clock, registry, os.environ, os.getpid(), _boot_id())
        return Daemon(config_path, config, rules, parts, around)
    except (ConfigError, JournalError, AdminError, TokenError) as error:
        raise CliError(str(error)) from error


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
