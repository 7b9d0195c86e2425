"""``autotune engine``: start an engine alone."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import typer

from autotune.cli._shared import CliError


def register(app: typer.Typer) -> None:
    # The options are the engine's own; its parser reads them and prints their help.
    settings = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command("engine", short_help="Serve a model (OpenAI API).", context_settings=settings, add_help_option=False)(
        engine
    )


def engine(context: typer.Context) -> None:
    """Serve a model over an OpenAI-compatible API (all options: autotune engine --help)."""
    from autotune.supervisor import die_with_parent  # noqa: PLC0415
    from engine.arguments import options_from, parser  # noqa: PLC0415
    from engine.errors import EXIT_CONFIGURATION, ConfigurationError, EngineError  # noqa: PLC0415
    from engine.logs import set_up_logging  # noqa: PLC0415
    from engine.serve import serve  # noqa: PLC0415

    def usage(message: str) -> NoReturn:
        raise CliError(f"{message} (see autotune engine --help)", 2)

    die_with_parent(os.environ)
    reader = parser("autotune engine")
    reader.error = usage  # type: ignore[method-assign]  # one line in place of the usage text
    arguments = reader.parse_args(context.args)
    set_up_logging(arguments.log_level, arguments.log_format, os.environ)
    try:
        serve(options_from(arguments))
    except ConfigurationError as error:
        raise CliError(str(error), EXIT_CONFIGURATION) from error
    except EngineError as error:
        raise CliError(str(error)) from error
    except ModuleNotFoundError as error:
        hint = "the engine needs more than the daemon: pip install 'kv-autotune[engine]'"
        raise CliError(f"{error.name} is not installed; {hint}") from error
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a step that hangs in a thread must not keep a stopped engine alive
