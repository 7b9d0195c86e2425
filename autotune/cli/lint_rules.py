"""``autotune lint-rules``: rules that cannot do what they are meant to do."""

from __future__ import annotations

import typer

from autotune.cli._shared import CliError
from autotune.cli._simulated import RulesArgument


def register(app: typer.Typer) -> None:
    app.command("lint-rules", short_help="Find rules that contradict themselves.")(lint_rules)


def lint_rules(rules: RulesArgument) -> None:
    """Find rules that are never reached, always shadowed or never released, regions without any, and rules that flap.

    One line per finding; exit code 0 without any, 1 with some, 2 for a file that is no rules file.
    """
    from policies.lint import lint  # noqa: PLC0415
    from policies.rules import RuleError, load_rules  # noqa: PLC0415

    try:
        findings = lint(load_rules(rules))
    except RuleError as error:
        raise CliError("\n".join(error.problems), 2) from error
    except ValueError as error:
        raise CliError(f"{rules}: {error}", 2) from error
    for finding in findings:
        typer.echo(str(finding))
    if findings:
        raise typer.Exit(1)
    typer.echo(f"{rules}: nothing found")
