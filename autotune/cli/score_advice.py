"""``autotune score-advice``: what following the advice would have been worth, on a simulated engine."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli._shared import (
    CliError,
    ConfigOption,
    JournalOption,
    given_path,
    journal_path,
    reading_journal,
    tick_range,
)

if TYPE_CHECKING:
    from autotune.config import Config
    from envs.profile import Profile
    from policies.advice_score import Moment, Score

_LEAST_MOMENTS = 10


def register(app: typer.Typer) -> None:
    app.command("score-advice", short_help="What following the advice would have been worth (simulated).")(score_advice)


def score_advice(
    ids: Annotated[str, typer.Argument(metavar="[FIRST[-LAST]]", help="A range of ticks; all without.")] = "",
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Of autotune profile; the configuration's if absent.", parser=given_path),
    ] = None,
    journal: JournalOption = None,
    config: ConfigOption = None,
    draws: Annotated[int, typer.Option(min=1, max=100, help="How often arrivals are drawn anew.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="All figures, as JSON.")] = False,
) -> None:
    """Play what advise mode recorded on a simulated engine, as it was and as advised. Nothing of it is measured."""
    from autotune.advice import AdviceReader  # noqa: PLC0415
    from envs.signals import Targets  # noqa: PLC0415
    from policies.advice_score import drawn, score  # noqa: PLC0415

    reader = AdviceReader()
    moments, settings = _recorded(reader, journal_path(journal, config), tick_range(ids))
    engine = _profile(profile or settings.policy.profile)
    targets = Targets(settings.targets.ttft_s, settings.targets.tbt_s, settings.targets.quantile)
    runs: dict[str, list[Score]] = {"as it was": [], "as advised": []}
    for seed in range(draws):
        try:
            trace = drawn(moments, engine.model.max_model_len, seed)
            for name, found in runs.items():
                found.append(score(moments, trace, engine, targets, advised=name == "as advised"))
        except ValueError as error:
            raise CliError(str(error)) from error
    document = _document(runs, moments, reader)
    if as_json:
        typer.echo(json.dumps(document, indent=2))
        return
    for line in _lines(document):
        typer.echo(line)


def _recorded(reader: Any, path: Path, ids: tuple[int, int | None]) -> tuple[list[Moment], Config]:
    from autotune.journal_file import read_runs, read_ticks_between  # noqa: PLC0415
    from autotune.run_document import RunError, read_run  # noqa: PLC0415

    with reading_journal():
        ticks = list(read_ticks_between(path, *ids))
        moments, runs = reader.read(ticks), read_runs(path)
    if len(moments) < _LEAST_MOMENTS:
        raise CliError(
            f"journal {path}: {len(moments)} ticks in advise mode with an engine that was well, at least "
            f"{_LEAST_MOMENTS} are needed; switch the daemon with `autotune mode advise`"
        )
    run = next(tick.run for tick in reversed(ticks) if tick.body.get("mode") == "advise")
    try:
        return moments, read_run(runs.get(run, {}))[0]
    except RunError as error:
        raise CliError(f"run {run}: {error}") from error


def _profile(path: Path | None) -> Profile:
    from envs.profile import ProfileError, read_profile  # noqa: PLC0415

    if path is None:
        raise CliError("name the engine's profile with --profile (autotune profile makes one)", 2)
    try:
        return read_profile(path)
    except ProfileError as error:
        raise CliError(str(error)) from error


def _document(runs: dict[str, list[Score]], moments: list[Moment], reader: Any) -> dict[str, Any]:
    was, advised = runs["as it was"], runs["as advised"]
    return {
        "simulated": True,
        "seconds": round(moments[-1].at_s - moments[0].at_s, 3),
        "ticks": len(moments),
        "left_out": reader.left_out,
        "changes_advised": reader.advised,
        "draws": {name: [one.to_json() for one in found] for name, found in runs.items()},
        "saved": {
            "over_s": [before.over_s - after.over_s for before, after in zip(was, advised, strict=True)],
            "preemptions": [before.preemptions - after.preemptions for before, after in zip(was, advised, strict=True)],
        },
    }


def _lines(document: dict[str, Any]) -> list[str]:
    head = f"simulated: {document['seconds']:.0f} s in advise mode, {document['changes_advised']} changes advised"
    lines = [f"{head}, {len(document['saved']['over_s'])} draws of arrivals like those seen"]
    for name, found in document["draws"].items():
        shares = [one["good"] / one["offered"] for one in found]
        losses = [one["loss_per_token"] for one in found]
        over, preempted = ([one[key] for one in found] for key in ("over_s", "preemptions"))
        lines.append(
            f"simulated, {name}: {_range(over)} s over target, {_range(preempted)} preemptions, "
            f"{mean(shares):.1%} of requests inside all targets, loss per token {mean(losses):.2%}"
        )
    saved = document["saved"]
    lines.append(
        f"simulated: saved {_range(saved['over_s'])} s over target, {_range(saved['preemptions'])} preemptions"
    )
    return lines


def _range(values: list[float]) -> str:
    low, high = min(values), max(values)
    return f"{mean(values):.0f}" + ("" if low == high else f" ({low:.0f} to {high:.0f})")
