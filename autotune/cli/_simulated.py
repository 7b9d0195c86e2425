"""Options that the verbs that simulate have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autotune.cli._shared import given_path

ProfileOption = Annotated[
    Path | None,
    typer.Option(help="From autotune profile; an estimated Llama 3 8B on an L4 if absent.", parser=given_path),
]
PoolOption = Annotated[str | None, typer.Option(help="KV pool, like 64M or 2G (the profile's).")]
IntervalOption = Annotated[float, typer.Option(help="Seconds between two decisions.")]
LengthScaleOption = Annotated[float, typer.Option(help="Divide prompt and output lengths by this.")]
NoiseOption = Annotated[float, typer.Option(help="Relative deviation of gaps and lengths.")]
TtftOption = Annotated[float, typer.Option(help="Seconds to the first token.")]
TbtOption = Annotated[float, typer.Option(help="Seconds between tokens.")]
BudgetOption = Annotated[float, typer.Option(metavar="PCT", min=0, help="Loss per token, percent.")]
JobsOption = Annotated[int, typer.Option("--jobs", "-j", min=0, help="Processes; 0: one per CPU.")]
RulesArgument = Annotated[str, typer.Argument(metavar="FILE", help="A rules file, or a preset's name.")]
