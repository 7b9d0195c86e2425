"""``autotune tunables``: every knob of a running engine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli._shared import ConfigOption, ControlOption, connect, console_for_stdout
from autotune.writers import STARTUP_WRITER, ends_ns, until_text, who_of
from engine.clock import RealClock
from engine.text import one_line
from engine.tunables import TUNABLES

if TYPE_CHECKING:
    from engine.control_client import TunablesView


def register(app: typer.Typer) -> None:
    app.command("tunables", short_help="Show every knob of the engine.")(tunables)


def tunables(
    control: ControlOption = None,
    config: ConfigOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="The control API's answer, as JSON.")] = False,
) -> None:
    """Show every knob of the engine: desired and effective value, progress, and who wrote it last."""
    with connect(control, config) as client:
        view = client.tunables()
    if as_json:
        typer.echo(json.dumps(view, indent=2))
        return
    _print_table(view)


def _print_table(view: TunablesView) -> None:
    from rich import box  # noqa: PLC0415  # only people need it
    from rich.markup import escape  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    console = console_for_stdout()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("knob", "desired", "effective", "allowed", "last writer"):
        table.add_column(heading, overflow="fold", no_wrap=heading in {"knob", "desired", "effective"})
    reasons, clock = [], RealClock()
    for knob, desired in view["desired"].items():
        allowed = " ".join(str(value) for value in TUNABLES[knob].values) if knob in TUNABLES else ""
        writer = view["writers"].get(knob)
        name = writer["writer"] if writer else ""
        cells = (knob, desired, view["effective"].get(knob, "?"), allowed, who_of(name))
        table.add_row(*(escape(one_line(cell)) for cell in cells))
        ends = ends_ns(name)
        until = "" if ends is None else f", {who_of(name)} {until_text(ends, clock.now_ns(), clock.wall_s())}"
        if writer and name != STARTUP_WRITER and (writer["reason"] or until):
            reasons.append(one_line(f"{knob}, revision {writer['revision']}{until}: {writer['reason']}", 1000))
    console.print(table)
    for line in reasons:
        console.print(line, markup=False)
    progress = view["progress"]
    resident = ", ".join(
        f"{row['kv_format']}/{row['block_size']} {row['bytes'] / 2**20:.2f} MiB"
        for row in progress["resident"]
        if row["bytes"]
    )
    console.print(f"revision {view['revision']}, engine {one_line(view['instance'])}", markup=False)
    console.print(f"resident: {resident or 'nothing'}; {progress['converged_fraction']:.1%} converged", markup=False)
    if progress["held_below_format_bytes"]:
        below = progress["held_below_format_bytes"] / 2**20
        console.print(f"{below:.2f} MiB stay in a lossier format than asked for: lost precision is not invented again")
