"""``autotune undo``: take one of the daemon's changes back by hand."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli._shared import (
    CliError,
    ConfigOption,
    ControlOption,
    JournalOption,
    connect,
    journal_path,
    operator,
)

if TYPE_CHECKING:
    from autotune.journal_file import Tick

_LOOKED_AT = 1000


def register(app: typer.Typer) -> None:
    app.command("undo", short_help="Take a change back.")(undo)


def undo(
    tick: Annotated[
        int | None, typer.Argument(metavar="[ID]", min=1, help="Which; the newest if absent (`autotune decisions`).")
    ] = None,
    control: ControlOption = None,
    journal: JournalOption = None,
    config: ConfigOption = None,
) -> None:
    """Set a knob back to what one of the daemon's changes replaced. The daemon then leaves it alone until released.

    Only while the knob still is where that change put it.
    """
    row = _change(journal_path(journal, config), tick)
    knob, old, new = row["knob"], row["old"], row["new"]
    if old is None:
        raise CliError(f"tick {row['tick']} does not know what {knob} was before; set it with autotune set")
    with connect(control) as client:
        view = client.tunables()
        now = view["desired"].get(knob)
        if now != new:
            raise CliError(f"{knob} is {now} by now, not {new} as tick {row['tick']} left it; set it with autotune set")
        reason = f"undo of tick {row['tick']}"
        answer = client.patch({knob: old}, writer=operator(), reason=reason, if_revision=view["revision"])
    result = answer["results"][knob]
    if result["status"] not in {"applied", "converging"}:
        raise CliError(f"{knob}={old}: {result['status']}, {result['why']}")
    typer.echo(f"{knob} {new} -> {old}: {result['status']}; left alone until: autotune release {knob}")


def _change(path: Path, tick_id: int | None) -> dict[str, Any]:
    from autotune.journal_file import JournalError, read_tick, read_ticks  # noqa: PLC0415

    try:
        if tick_id is None:
            ticks = read_ticks(path, limit=_LOOKED_AT, acted_only=True)
        else:
            found = read_tick(path, tick_id)
            ticks = [] if found is None else [found]
    except JournalError as error:
        raise CliError(f"{error}; name the daemon's with --journal or --config") from error
    rows = [row for tick in ticks if (row := _written(tick)) is not None]
    if not rows:
        which = "it has changed nothing lately" if tick_id is None else f"tick {tick_id} changed nothing"
        raise CliError(f"{which}; `autotune decisions` shows what was changed")
    return rows[-1]


def _written(tick: Tick) -> dict[str, Any] | None:
    row: dict[str, Any] | None = tick.body.get("decision")
    return row if row is not None and row["verdict"] in {"applied", "converging"} else None
