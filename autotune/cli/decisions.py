"""``autotune decisions``: what the daemon decided, why, and what it did, out of the journal."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli._shared import CliError, ConfigOption, JournalOption, journal_path, reading_journal, reading_row
from autotune.decisions import move_of, outcome_words, said
from autotune.writers import who_of
from engine.text import one_line

if TYPE_CHECKING:
    from autotune.journal_file import Tick

_FOLLOW_S = 0.5
_MOST_WAITED_FOR = 50  # a daemon that died never tells the effect of its last changes
_SHOWN_EFFECTS = (
    ("ttft_tail_s", "TTFT tail", "s"),
    ("tbt_tail_s", "TBT tail", "s"),
    ("goodput_rps", "goodput", "req/s"),
    ("kv_usage", "KV usage", ""),
)


def register(app: typer.Typer) -> None:
    app.command("decisions", short_help="Show what the daemon decided, and why.")(decisions)


def decisions(
    number: Annotated[int, typer.Option("-n", "--number", min=1, max=100_000, help="How many, the newest.")] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new ones until Ctrl-C.")] = False,
    journal: JournalOption = None,
    config: ConfigOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
) -> None:
    """Show the daemon's recent decisions with their reasons and measured effects, oldest first."""
    path = journal_path(journal, config)
    ticks = _read(path, number, 0)
    if not ticks:
        typer.echo(one_line(f"nothing has been decided yet, by the journal {path}"), err=True)
    unmeasured = _show(ticks, as_json=as_json)
    last = max((tick.id for tick in ticks), default=0)
    while follow:
        time.sleep(_FOLLOW_S)
        ticks = _read(path, 10_000, min([last, *(tick - 1 for tick in unmeasured)]))
        unmeasured = _show(ticks, as_json=as_json, shown_up_to=last, unmeasured=unmeasured)
        last = max([last, *(tick.id for tick in ticks)])


def _show(
    ticks: list[Tick], *, as_json: bool, shown_up_to: int = 0, unmeasured: frozenset[int] = frozenset()
) -> frozenset[int]:
    """Print new decisions and newly measured effects; returns the decisions whose effect is still to come."""
    waiting = set()
    for tick in ticks:
        is_new, is_waited_for = tick.id > shown_up_to, tick.id in unmeasured
        try:
            with reading_row(tick.id):
                lines, is_open = _lines(tick, as_json=as_json, is_new=is_new, is_waited_for=is_waited_for)
        except CliError as error:
            typer.echo(one_line(error), err=True)
            continue
        for line in lines:
            typer.echo(line)
        if is_open:
            waiting.add(tick.id)
    return frozenset(sorted(waiting)[-_MOST_WAITED_FOR:])


def _lines(tick: Tick, *, as_json: bool, is_new: bool, is_waited_for: bool) -> tuple[list[str], bool]:
    """What is told of a tick now, and whether its effect is still to come."""
    lines = []
    if is_new:
        lines = [json.dumps({**row, "effect": tick.effect}) if as_json else _line(row) for row in _rows(tick)]
    if tick.effect is None or (is_waited_for and not {"outcome", "unknown"} & set(tick.effect)):
        return lines, _took_effect(tick) and (is_new or is_waited_for)
    if not as_json and (is_new or is_waited_for):
        lines.append(_effect_line(tick.id, tick.effect))
    return lines, False


def _read(path: Path, limit: int, after_id: int) -> list[Tick]:
    from autotune.journal_file import read_ticks  # noqa: PLC0415

    with reading_journal():
        return read_ticks(path, limit=limit, acted_only=True, after_id=after_id)


def _rows(tick: Tick) -> list[dict[str, Any]]:
    own = tick.body.get("decision")
    return [
        *tick.body.get("overrides_begun", []),
        *([own] if own else []),
        *tick.body.get("at_exit", []),
        *tick.body.get("restarts", []),
    ]


def _took_effect(tick: Tick) -> bool:
    own = tick.body.get("decision")
    return own is not None and own["verdict"] in {"applied", "converging"}


def _line(row: dict[str, Any]) -> str:
    when = datetime.fromtimestamp(row["wall_s"], UTC).astimezone().strftime("%H:%M:%S")
    move = move_of(row["knob"], row["old"], row["new"])
    head = f"{when} [{row['tick']}] {move}: {row['verdict']}"
    text = said(row["scenario"], row["reason"], row["why"], move)
    return one_line(f"{head} ({row['scenario']}, by {who_of(row['writer'])}) {text}", 1000)


def _effect_line(tick: int, effect: Any) -> str:
    if "unknown" in effect:
        return one_line(f"         [{tick}] effect unknown: {effect['unknown']}")
    parts = []
    for name, label, unit in _SHOWN_EFFECTS:
        before, after = effect.get("before", {}).get(name), effect.get("after", {}).get(name)
        if before is not None or after is not None:
            parts.append(f"{label} {_figure(before)} -> {_figure(after)} {unit}".rstrip())
    others = effect.get("together_with") or []
    also = f" (together with {', '.join(map(str, others))})" if others else ""
    if effect.get("without_service_s") is not None:
        parts.append(f"{effect['without_service_s']:.1f} s without service")
    outcome = f"; {outcome_words(effect['outcome'])}" if "outcome" in effect else ""
    return one_line(f"         [{tick}] effect: {', '.join(parts) or 'nothing was measured'}{also}{outcome}", 1000)


def _figure(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g}"
