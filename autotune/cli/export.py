"""``autotune export``: from a training run to a policy that the daemon can run without torch."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from autotune.cli._shared import CliError, new_path


def register(app: typer.Typer) -> None:
    app.command("export", short_help="Make a policy of a training run.")(export)


def export(
    run: Annotated[Path, typer.Argument(help="Folder of autotune train; of several runs the best is taken.")],
    *,
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder of the policy.", parser=new_path)] = Path("policy"),
) -> None:
    """Write RUN's best model as weights.safetensors and card.json, which say all that a policy has to agree with."""
    from autotune.cli.train import EXTRA  # noqa: PLC0415

    try:
        from policies.train.publish import publish  # noqa: PLC0415  # torch, and not for --help
        from policies.train.recipe import read_recipe  # noqa: PLC0415
        from policies.train.sweep import best_run, profile_of  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise CliError(f"{error.name} is not installed; {EXTRA}") from error
    from engine.errors import EngineError  # noqa: PLC0415
    from policies.card import PolicyFileError  # noqa: PLC0415

    try:
        chosen = best_run(run)
        profile = profile_of(read_recipe(chosen))
        card = publish(chosen, out, profile, created=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}")
    except (PolicyFileError, EngineError) as error:
        raise CliError(str(error)) from error
    except ValueError as error:
        raise CliError(" ".join(str(error).split())) from error
    except OSError as error:
        raise CliError(f"{error.filename}: {error.strerror}") from error
    typer.echo(f"{out}: {card.name}, {card.training.steps} steps, {card.profile.description}")
    for score in card.scores:
        typer.echo(f"  {score.policy} {score.figure} {score.mean:.4g} ({score.low:.4g} to {score.high:.4g})")
