"""``autotune check-config``: every fault of a configuration file, one line each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli._shared import CliError, given_path, tell_choice

if TYPE_CHECKING:
    from autotune.config import Config


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
        raise CliError("\n".join(_with_what_it_names(file, error.problems))) from error
    typer.echo(f"{file}: ok (mode {config.mode}, policy {policy.name})")
    typer.echo(f"quality: {what_holds(guard)}")
    if config.engine.kind != "autotune":
        typer.echo(f"restart: {_permission(config)}")
    tell_choice(policy)


def _permission(config: Config) -> str:
    if not config.restart.allowed:
        return f"not permitted; {config.engine.kind} at {config.engine.url} is watched, and advice given"
    commands = "; ".join(" ".join(command) for command in config.restart.commands)
    return (
        f"PERMITTED, at most every {config.restart.min_interval_s:g} s, writing {config.restart.file}, by: {commands}"
    )


def _with_what_it_names(file: Path, problems: list[str]) -> list[str]:
    """The faults that were found, and those of rules and profile, which are read only once the rest is right."""
    from autotune.config import ConfigError, files_named_in  # noqa: PLC0415
    from autotune.wiring import check_rules, guard_of  # noqa: PLC0415

    config, found = files_named_in(file), list(problems)
    if config is None:
        return found
    checks: tuple[Callable[[Config], object], ...] = (check_rules, guard_of)
    for check in checks:
        try:
            check(config)
        except ConfigError as error:
            found += error.problems
    return list(dict.fromkeys(found))
