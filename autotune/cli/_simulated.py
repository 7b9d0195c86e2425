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
TtftOption = Annotated[
    float | None, typer.Option(help="Seconds to the first token (5 times what a lone request takes).")
]
TbtOption = Annotated[float | None, typer.Option(help="Seconds between tokens (2.5 times what a lone request takes).")]
BudgetOption = Annotated[float, typer.Option(metavar="PCT", min=0, help="Loss per token, percent.")]
JobsOption = Annotated[int, typer.Option("--jobs", "-j", min=0, help="Processes; 0: one per CPU.")]
RulesArgument = Annotated[str, typer.Argument(metavar="FILE", help="A rules file, or a preset's name.")]

YEAR_S = 31_536_000.0
# What may be asked for, inclusive: in here nanoseconds are exact and a run has an end.
_LIMITS = {
    "--interval": (1e-3, 86_400.0),
    "--duration": (1e-3, YEAR_S),
    "--hours": (0.0, YEAR_S / 3600),
    "--constant-hours": (0.0, YEAR_S / 3600),
    "--rate-scale": (1e-6, 1e6),
    "--length-scale": (1e-6, 1e6),
    "--minutes": (0.0, YEAR_S / 60),
    "--price": (1e-9, 1e9),
}


def check_limits(**values: float | None) -> None:
    """Options by name, with ``_`` for ``-``; None is left out. Raises ValueError, one line."""
    for name, value in values.items():
        option = f"--{name.replace('_', '-')}"
        least, most = _LIMITS[option]
        if value is not None and not least <= value <= most:
            raise ValueError(f"{option} must be from {least:g} to {most:g}, got {value:g}")
