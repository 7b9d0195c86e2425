"""``autotune advise``: watch a running server and say what other KV settings would be worth."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli._shared import CliError, ConfigOption, configured, given_path
from engine.text import one_line

if TYPE_CHECKING:
    from autotune.adapters.http_engine import HttpEngine
    from autotune.adapters.watching import Watch
    from autotune.config import Config
    from engine.clock import Clock
    from envs.profile import Profile
    from policies.restart_advice import Terms

_FEW = 5


def register(app: typer.Typer) -> None:
    app.command("advise", short_help="Watch a vLLM, SGLang or llama.cpp server and advise.")(advise)


def advise(
    url: Annotated[str, typer.Option("--url", metavar="URL", help="The server, such as http://127.0.0.1:8000.")],
    engine: Annotated[str, typer.Option(help="vllm, sglang, llamacpp, or auto: by its metrics page.")] = "auto",
    duration: Annotated[float, typer.Option(min=2, max=604_800, help="Seconds to watch.")] = 60.0,
    every: Annotated[float, typer.Option(min=0.05, max=60, help="Seconds between two readings.")] = 1.0,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Of autotune profile: simulates as well.", parser=given_path),
    ] = None,
    config: ConfigOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="All figures, as JSON.")] = False,
) -> None:
    """Watch a server and say what would be changed, what that would have saved, and what a restart costs.

    It only reads. Targets and prices are the configuration's, or its defaults. Whatever was not measured is marked.
    """
    from autotune.adapters.find import adapter_of  # noqa: PLC0415
    from autotune.adapters.report import document, lines  # noqa: PLC0415
    from autotune.config import Config  # noqa: PLC0415
    from engine.clock import RealClock  # noqa: PLC0415

    settings = configured(config) or Config()
    model = None if profile is None else _profile(profile)
    if duration / every < _FEW:
        raise CliError(f"--duration {duration:g} over --every {every:g}: too few readings to tell anything", 2)
    clock = RealClock()
    try:
        adapter = adapter_of(engine, url, clock)
    except ValueError as error:
        raise CliError(one_line(error), 2) from error
    watch, missed = _watch(adapter, settings, clock, duration, every)
    terms = _terms(settings, duration)
    found = document(watch, adapter, str(adapter.identity()), adapter.url, terms, missed)
    if model is not None and found["advice"]["changes"]:
        found["simulated"] = _play(watch, adapter, terms, model)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    for line in lines(found):
        typer.echo(one_line(line, 1000))


def _watch(adapter: HttpEngine, settings: Config, clock: Clock, duration_s: float, every_s: float) -> tuple[Watch, int]:
    from rich.console import Console  # noqa: PLC0415

    from autotune.adapters.watching import Watch  # noqa: PLC0415
    from autotune.waiting import waiting  # noqa: PLC0415
    from engine.control_client import EngineUnreachable  # noqa: PLC0415
    from envs.signals import Targets  # noqa: PLC0415

    targets = settings.targets
    watch = Watch(
        Targets(targets.ttft_s, targets.tbt_s, targets.quantile),
        short_s=settings.window_s,
        long_s=settings.long_window_s,
    )
    watch.take(adapter.read())  # an engine that does not answer is said at once
    missed, began_ns = 0, clock.now_ns()
    with waiting(Console(stderr=True), f"watching {adapter.url} for {duration_s:g} s"):
        for number in range(1, round(duration_s / every_s) + 1):
            time.sleep(max(0.0, began_ns / 1e9 + number * every_s - clock.now_ns() / 1e9))
            try:
                watch.take(adapter.read())
            except EngineUnreachable:
                missed += 1
    return watch, missed


def _terms(settings: Config, duration_s: float) -> Terms:
    from autotune.adapters.wire import rules_of  # noqa: PLC0415

    terms = rules_of(settings).terms
    return replace(terms, least_s=min(terms.least_s, 0.8 * duration_s))


def _play(watch: Watch, adapter: HttpEngine, terms: Terms, profile: Profile) -> dict[str, Any]:
    from autotune.adapters.played import play  # noqa: PLC0415
    from autotune.adapters.report import advices, chosen  # noqa: PLC0415

    found = advices(watch, adapter, terms)
    label = chosen(found)
    one = watch.engines[label]
    effective = {} if one.last is None else dict(one.last.effective)
    capacity = getattr(one.last, "capacity_tokens", None)
    try:
        return play(one.seen, found[label], dict(adapter.storage), effective, profile, watch.targets, capacity)
    except ValueError as error:
        return {"impossible": one_line(f"arrivals or their lengths are not known ({error})")}


def _profile(path: Path) -> Profile:
    from envs.profile import ProfileError, read_profile  # noqa: PLC0415

    try:
        return read_profile(path)
    except ProfileError as error:
        raise CliError(str(error)) from error
