"""``autotune replay-decisions``: decide what the journal recorded once more, and compare bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autotune.cli._shared import CliError, ConfigOption, JournalOption, journal_path, reading_journal, tick_range
from engine.text import one_line


def register(app: typer.Typer) -> None:
    app.command("replay-decisions", short_help="Decide recorded ticks again and compare.")(replay_decisions)


def replay_decisions(
    ids: Annotated[str, typer.Argument(metavar="[FIRST[-LAST]]", help="A tick, or a range of them; all without.")] = "",
    journal: JournalOption = None,
    config: ConfigOption = None,
) -> int:
    """Run policy and guard again on what every tick recorded. Exit code 0 only if all came out the same."""
    from autotune.journal_file import read_runs, read_ticks_between  # noqa: PLC0415
    from autotune.rethinking import Rethinker  # noqa: PLC0415
    from autotune.wiring import minds_of  # noqa: PLC0415

    first, last = tick_range(ids)
    path: Path = journal_path(journal, config)
    with reading_journal():
        replayed = Rethinker(read_runs(path), minds_of).replay(read_ticks_between(path, first, last))
    if not replayed.ticks:
        raise CliError(f"journal {path}: no such ticks; `autotune decisions` shows some")
    for line in replayed.lines:
        typer.echo(one_line(line))
    typer.echo(replayed.summary())
    return int(replayed.same + replayed.held != replayed.ticks)
