"""``autotune explain``: everything that one tick saw, thought and did."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli._shared import (
    CliError,
    ConfigOption,
    JournalOption,
    journal_path,
    reading_journal,
    reading_row,
    tick_id,
)
from autotune.decisions import outcome_words
from autotune.writers import who_of
from engine.text import one_line

if TYPE_CHECKING:
    from autotune.journal_file import Tick

_SEEN = (
    "load", "offered_rps", "kv_usage", "kv_demand", "running", "waiting", "preemptions_per_s", "ttft_tail_s",
    "tbt_tail_s", "slo_attainment", "goodput_rps",
)  # fmt: skip


def register(app: typer.Typer) -> None:
    app.command("explain", short_help="Show what one tick saw, decided, and did.")(explain)


def explain(
    tick: Annotated[
        int, typer.Argument(metavar="ID", help="The tick; `autotune decisions` shows them.", parser=tick_id)
    ],
    journal: JournalOption = None,
    config: ConfigOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="The whole record, as JSON.")] = False,
) -> None:
    """Show what one tick saw, what was wanted and why, the guard's verdict, and what was predicted and measured."""
    from autotune.journal_file import read_tick  # noqa: PLC0415

    path = journal_path(journal, config)
    with reading_journal():
        found = read_tick(path, tick)
    if found is None:
        raise CliError(f"journal {path}: no tick {tick} (any more); `autotune decisions` shows some")
    if found.damaged:
        raise CliError(f"journal {path}: tick {tick} is damaged: {found.damaged}")
    if as_json:
        typer.echo(json.dumps(vars(found), indent=2))
        return
    with reading_row(tick):
        lines = list(_lines(found))
    for line in lines:
        typer.echo(one_line(line, 1500))


def _lines(tick: Tick) -> Iterator[str]:
    body = tick.body
    when = datetime.fromtimestamp(tick.wall_s, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    parts = [f"tick {tick.id} at {when}", f"run {tick.run}"]
    parts += [f"{name} {body[name]}" for name in ("mode", "policy") if name in body]
    parts += [f"engine {body['health']}"] if "health" in body else []
    yield "; ".join(parts)
    seen = body.get("observation")
    if seen:
        yield "saw: " + ", ".join(f"{name} {_figure(seen['values'].get(name))}" for name in _SEEN)
        knobs = " ".join(f"{knob}={value}" for knob, value in seen["tunables"].items())
        yield f"watched for {seen['observed_s']:.0f} s; {knobs or 'no knob is known'}"
    for knob, (writer, revision, reason, *_) in body.get("writers", {}).items():
        yield f"writer: {knob} was written by {who_of(writer)} at revision {revision}: {reason or 'no reason given'}"
    proposal = body.get("proposal")
    yield f"wanted: {'nothing' if not proposal else '='.join(map(str, proposal))} ({_because(body)})"
    if "verdict" in body:
        yield "guard: " + ": ".join(body["verdict"])
    yield from _done(tick)
    for row in [*body.get("overrides_begun", []), *body.get("at_exit", []), *body.get("restarts", [])]:
        yield f"besides: {row['knob']} {row['old']} -> {row['new']}: {row['verdict']} by {who_of(row['writer'])}"
    for judged, outcome, why in body.get("judged") or []:
        yield f"judged: tick {judged}: {outcome}: {why}"


def _done(tick: Tick) -> Iterator[str]:
    body = tick.body
    if body.get("predicted"):
        yield "predicted: " + ", ".join(f"{name} {_figure(value)}" for name, value in body["predicted"].items())
    written = body.get("written")
    if written:
        status, why, revision = written
        at = "" if revision is None else f" at revision {revision}"
        yield f"written: {status}{at}{f': {why}' if why else ''}"
    decision = body.get("decision")
    if decision is None or decision["verdict"] not in {"applied", "converging"}:
        return
    effect = tick.effect or {}
    yield f"measured: {_measured(effect)}"
    if "outcome" in effect:
        yield f"outcome: {outcome_words(effect['outcome'])} ({effect['why']})"
    yield f"undo: autotune undo {tick.id} (sets {decision['knob']}={decision['old']})"


def _because(body: Any) -> str:
    return ": ".join(str(body[name]) for name in ("scenario", "reason") if body.get(name)) or "no reason recorded"


def _measured(effect: Any) -> str:
    if "unknown" in effect:
        return f"unknown: {effect['unknown']}"
    before, after = effect.get("before", {}), effect.get("after", {})
    moves = [f"{name} {_figure(before[name])} -> {_figure(after.get(name))}" for name in _SEEN if name in before]
    return ", ".join(moves) or "not yet"


def _figure(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g}"
