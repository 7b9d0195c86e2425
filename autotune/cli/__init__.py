"""The ``autotune`` command: one file per verb, registered here. Importing it loads neither torch nor an engine."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Annotated, Final

import typer

from autotune.cli._shared import fail_with

# Verb modules in the order of the help page; each has ``register(app)``.
_VERBS: Final = (
    "run",
    "engine",
    "daemon",
    "tunables",
    "audit",
    "set_tunable",
    "pins",
    "status",
    "decisions",
    "explain",
    "undo",
    "orders",
    "replay_decisions",
    "advise",
    "score_advice",
    "plan",
    "doctor",
    "fleet",
    "check_config",
    "replay",
    "compare_formats",
    "trace",
    "record_proxy",
    "profile",
    "simulate",
    "evaluate",
    "check_policy",
    "lint_rules",
    "explain_rules",
    "tune_rules",
    "train",
    "export",
)

app = typer.Typer(
    name="autotune",
    help="Keeps an LLM inference service inside its latency targets by changing its KV cache live.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        from importlib.metadata import version as installed_version  # noqa: PLC0415  # slow, and rarely asked for

        typer.echo(installed_version("kv-autotune"))
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit


for _verb in _VERBS:
    if importlib.util.find_spec(f"autotune.cli.{_verb}") is not None:
        importlib.import_module(f"autotune.cli.{_verb}").register(app)


def main() -> None:
    """Entry point: every error is one line on stderr and a non-zero exit code (2 for wrong usage, else 1)."""
    sys.exit(fail_with(lambda: app(standalone_mode=False)))
