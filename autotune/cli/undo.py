"""``autotune undo``: take one of the daemon's changes back by hand."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import typer

from autotune.cli._shared import (
    CliError,
    ConfigOption,
    ControlOption,
    JournalOption,
    connect,
    journal_path,
    operator,
    reading_journal,
    tick_id,
)
from autotune.writers import who_of
from engine.shapes import fits
from engine.tunables import TunableValue

if TYPE_CHECKING:
    from autotune.journal_file import Tick
    from engine.control_client import TunablesView

_LOOKED_AT = 1000


def register(app: typer.Typer) -> None:
    app.command("undo", short_help="Take a change back.")(undo)


def undo(
    tick: Annotated[
        int | None,
        typer.Argument(metavar="[ID]", help="Which; the newest if absent (`autotune decisions`).", parser=tick_id),
    ] = None,
    control: ControlOption = None,
    journal: JournalOption = None,
    config: ConfigOption = None,
) -> None:
    """Set a knob back to what one of the daemon's changes replaced. The daemon then leaves it alone until released.

    Only while the knob still is where that change put it; once. Without an ID it is the newest change, undone or not.
    """
    row = _change(journal_path(journal, config), tick)
    number, knob, old, new = row["tick"], row["knob"], row["old"], row["new"]
    if old is None:
        raise CliError(f"tick {number} does not know what {knob} was before; set it with autotune set")
    with connect(control, config) as client:
        view = client.tunables()
        if view["desired"].get(knob) != new:
            raise CliError(_why_not(row, view))
        answer = client.patch({knob: old}, writer=operator(), reason=_reason(number), if_revision=view["revision"])
    result = answer["results"][knob]
    if result["status"] not in {"applied", "converging"}:
        raise CliError(f"{knob}={old}: {result['status']}, {result['why']}")
    done = f"tick {number} undone: {knob} {new} -> {old}: {result['status']}"
    typer.echo(f"{done}; left alone until: autotune release {knob}")


def _reason(number: int) -> str:
    return f"undo of tick {number}"


def _why_not(row: dict[str, Any], view: TunablesView) -> str:
    """Why a change whose knob is elsewhere by now is not undone."""
    number, knob, old, new = row["tick"], row["knob"], row["old"], row["new"]
    now, last = view["desired"].get(knob), view["writers"].get(knob)
    if now == old and last is not None and last["reason"] == _reason(number):
        return (
            f"tick {number} has been undone already, by {who_of(last['writer'])}: {knob} is {now}; nothing is changed"
        )
    return f"{knob} is {now} by now, not {new} as tick {number} left it; set it with autotune set"


def _change(path: Path, number: int | None) -> dict[str, Any]:
    from autotune.journal_file import read_tick, read_ticks  # noqa: PLC0415

    shown = "`autotune decisions` shows what was changed"
    with reading_journal():
        if number is None:
            ticks = read_ticks(path, limit=_LOOKED_AT, acted_only=True)
        else:
            found = read_tick(path, number)
            if found is None:
                raise CliError(f"journal {path}: no tick {number} (any more); {shown}")
            ticks = [found]
    rows = [row for tick in ticks if (row := _written(tick)) is not None]
    if not rows:
        which = "it has changed nothing lately" if number is None else f"tick {number} changed nothing"
        raise CliError(f"{which}; {shown}")
    return rows[-1]


class _Change(TypedDict):
    """What must be known of a change to undo it."""

    tick: int
    knob: str
    old: TunableValue | None
    new: TunableValue
    verdict: str


def _written(tick: Tick) -> dict[str, Any] | None:
    row: dict[str, Any] | None = tick.body.get("decision")
    if row is None or not fits(row, _Change):
        return None
    return row if row["verdict"] in {"applied", "converging"} else None
