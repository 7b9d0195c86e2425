"""``autotune check-config``: every fault of a configuration file, one line each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autotune.cli._shared import CliError, given_path, tell_choice


def register(app: typer.Typer) -> None:
    app.command("check-config", short_help="Check a configuration and its rules.")(check_config)


def check_config(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The daemon's YAML configuration.", parser=given_path)],
) -> None:
    """Check a configuration, the rules and the profile that it names; exit code 0 if the daemon would take both."""
    from autotune.config import ConfigError, load_config  # noqa: PLC0415
    from autotune.wiring import check_rules, guard_of, policy_of  # noqa: PLC0415
    from policies.guards import what_holds  # noqa: PLC0415

    try:
        config = load_config(file)
        policy = policy_of(config, check_rules(config))
        guard = guard_of(config)
    except ConfigError as error:
        raise CliError(str(error)) from error
    typer.echo(f"{file}: ok (mode {config.mode}, policy {policy.name})")
    typer.echo(f"quality: {what_holds(guard)}")
    tell_choice(policy)
