"""``autotune simulate``: what policies would do to a workload, without an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli._places import check_places, is_stdout, write_parts
from autotune.cli._shared import CliError, given_path, tell_choice
from autotune.cli._simulated import (
    YEAR_S,
    IntervalOption,
    PoolOption,
    ProfileOption,
    TbtOption,
    TtftOption,
    check_limits,
)

if TYPE_CHECKING:
    from rich.console import Console

    from envs.profile import Profile
    from envs.signals import Targets
    from envs.workload.trace import Trace
    from policies.play import Played

_DEFAULT_S = 600.0
_DRAIN_S = 30.0
_USUAL_TARGETS = (
    "targets that are not given: 5 times the first token and 2.5 times the gap of requests that have the engine to "
    "themselves, as autotune evaluate fixes them"
)


def register(app: typer.Typer) -> None:
    app.command("simulate", short_help="Try policies on a simulated workload.")(simulate)


def simulate(
    workload: Annotated[str, typer.Argument(help="A trace file, or the name of a built-in workload.")],
    *,
    policy: Annotated[
        str,
        typer.Option(help="predictor, learned:PATH, auto, a preset, a rules file, static:KNOB=VALUE,..., or none."),
    ] = "default",
    compare: Annotated[list[str] | None, typer.Option(help="Another policy on the same traffic; repeatable.")] = None,
    profile: ProfileOption = None,
    duration: Annotated[float | None, typer.Option(help="Simulated seconds (a trace's own, else 600).")] = None,
    rate_scale: Annotated[float, typer.Option(help="Multiply the arrival rate by this.")] = 1.0,
    length_scale: Annotated[float, typer.Option(help="Divide prompt and output lengths of a trace by this.")] = 1.0,
    kv_pool_bytes: PoolOption = None,
    host_pool_bytes: Annotated[
        str | None, typer.Option(help="KV pool in host memory, like 2G, over the profile's link; none if absent.")
    ] = None,
    interval: IntervalOption = 1.0,
    ttft_target: TtftOption = None,
    tbt_target: TbtOption = None,
    seed: Annotated[int, typer.Option(min=0, help="Of generated workloads.")] = 0,
    html: Annotated[
        Path | None, typer.Option(help="Write a report with plots here; - for stdout.", parser=given_path)
    ] = None,
    json_out: Annotated[
        Path | None, typer.Option("--json", help="Write the figures here; - for stdout.", parser=given_path)
    ] = None,
) -> None:
    """Play policies through WORKLOAD on a simulated engine, one after the other on the same traffic.

    The engine is the real scheduler and cache on a virtual clock; step times come from the profile.
    """
    from rich.console import Console  # noqa: PLC0415  # heavy imports, and not for --help

    from autotune.simulation.report import Setting, html_report  # noqa: PLC0415
    from engine.errors import EngineError  # noqa: PLC0415
    from engine.sizes import parse_size  # noqa: PLC0415
    from envs.profile import read_profile  # noqa: PLC0415
    from envs.simulated import DEFAULT_PROFILE, SimulatedEngine  # noqa: PLC0415
    from policies.named import World, contender, read_from  # noqa: PLC0415
    from policies.play import play  # noqa: PLC0415

    console = Console(stderr=is_stdout(json_out) or is_stdout(html), highlight=False)
    try:
        pool_bytes = None if kv_pool_bytes is None else parse_size(kv_pool_bytes)
        host_bytes = 0 if host_pool_bytes is None else parse_size(host_pool_bytes)
        check_limits(interval=interval, rate_scale=rate_scale, length_scale=length_scale, duration=duration)
        named = (policy, *(compare or []))
        check_places(
            {"--html": html, "--json": json_out},
            {"WORKLOAD": workload, "--profile": profile}
            | {f"policy {text} ({place.name})": place for text in named for place in read_from(text)},
        )
        found = read_profile(profile or DEFAULT_PROFILE)
        traffic, notes, seconds = _traffic(workload, duration, rate_scale, length_scale, seed)
        sized = found if pool_bytes is None else found.model_copy(update={"pool_bytes": pool_bytes})
        targets = _targets(sized, traffic, seconds, ttft_target, tbt_target)
        contenders = [contender(text, World(found, targets)) for text in named]
        for who in contenders:
            tell_choice(who.policy)
        results: list[Played] = []
        with _progress(console) as bar:
            for who in contenders:
                task = bar.add_task(who.name, total=seconds)
                env = SimulatedEngine(
                    found, traffic, rate_scale=rate_scale, pool_bytes=pool_bytes, interval_s=interval, warm_up_s=0.0,
                    episode_s=seconds, repeats=False, values=who.values, targets=targets,
                    host_pool_bytes=host_bytes,
                )  # fmt: skip
                results.append(
                    play(
                        env, who, duration_s=seconds, interval_s=interval, seed=seed,
                        progress=lambda done, task=task: bar.update(task, completed=done),  # type: ignore[misc]
                    )
                )  # fmt: skip
    except EngineError as error:
        raise CliError(str(error)) from error
    except ValueError as error:
        raise CliError(str(error), 2) from error
    if None in {ttft_target, tbt_target}:
        notes = [*notes, _USUAL_TARGETS]
    setting = Setting(workload, found.describe(), found.is_estimated, targets, seed, interval, notes)
    _show(console, results, setting)
    if html is not None:
        write_parts(html, [html_report(results, setting)])
        if not is_stdout(html):
            console.print(f"report: {html}", markup=False, soft_wrap=True)
    _write_json(json_out, results, setting, found.digest)


def _traffic(
    workload: str, duration: float | None, rate_scale: float, length_scale: float, seed: int
) -> tuple[str | Trace, list[str], float]:
    """What the environment takes, notes about it, and for how long it goes on."""
    from envs.workload.catalogue import CATALOGUE  # noqa: PLC0415
    from envs.workload.loaders import load_trace  # noqa: PLC0415
    from envs.workload.scaling import Scaling, scale  # noqa: PLC0415

    path = Path(workload)
    if workload in CATALOGUE and not path.exists():
        return workload, [CATALOGUE[workload].description], duration or _DEFAULT_S
    if not path.is_file():
        raise ValueError(f"{workload}: no such file, nor a built-in workload ({', '.join(CATALOGUE)})")
    trace = scale(load_trace(path, seed=seed), Scaling(length_scale=length_scale))
    # What arrives last wants to be served, too.
    whole_s = trace.duration_s / rate_scale + _DRAIN_S
    if duration is None and whole_s > YEAR_S:
        raise ValueError(f"{workload} would last {whole_s:.3g} s; say with --duration how much of it to play")
    return trace, list(trace.notes), duration or whole_s


def _targets(
    profile: Profile, traffic: str | Trace, seconds: float, ttft_s: float | None, tbt_s: float | None
) -> Targets:
    """Those asked for; what is left open as evaluation fixes it for this profile and workload."""
    from envs.signals import Targets  # noqa: PLC0415
    from policies.evaluation.calibration import TOGETHER, usual_targets  # noqa: PLC0415
    from policies.evaluation.scenarios import Scenario, Span, evenly, sample  # noqa: PLC0415

    if ttft_s is not None and tbt_s is not None:
        return Targets(ttft_s, tbt_s)
    if isinstance(traffic, str):
        some = sample(Scenario(traffic, traffic), Span(min(seconds, _DEFAULT_S)), TOGETHER)
    else:
        some = evenly(traffic, TOGETHER)
    usual = usual_targets(profile, some)
    return Targets(usual.ttft_s if ttft_s is None else ttft_s, usual.tbt_s if tbt_s is None else tbt_s)


def _progress(console: Console) -> Any:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f} s"), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def _show(console: Console, results: list[Played], setting: Any) -> None:
    from rich.table import Table  # noqa: PLC0415

    from autotune.simulation.report import budget_note, notes_on, overload_note, rows, shown_name  # noqa: PLC0415

    header, cells = rows(results)
    # Policies as columns: names of figures are short, and a terminal is narrow.
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for played in results:
        table.add_column(shown_name(played), justify="right", overflow="fold")
    for index, name in enumerate(header[1:], 1):
        prefix = "TTFT " if name in {"p90", "p99"} and index < 7 else "TBT " if name == "p99" else ""
        table.add_row(f"{prefix}{name}", *(row[index] for row in cells))
    for note in setting.notes:
        console.print(note, markup=False, soft_wrap=True)
    console.print(f"profile: {setting.profile}", markup=False, soft_wrap=True)
    console.print(f"targets: {setting.targets_text}", markup=False, soft_wrap=True)
    console.print(table)
    free = budget_note(results)
    if free is not None:
        console.print(free, markup=False, soft_wrap=True)
    for note in notes_on(results):
        console.print(note, markup=False, soft_wrap=True)
    overload = overload_note(results)
    if overload is not None:
        console.print(overload, markup=False, soft_wrap=True, style="yellow")
    speeds = [f"{played.offered / played.wall_s:.0f}" for played in results if played.wall_s]
    console.print(f"simulated requests per second: {', '.join(speeds)}")


def _write_json(place: Path | None, results: list[Played], setting: Any, digest: str) -> None:
    if place is None:
        return
    document = {
        "workload": setting.workload,
        "profile": setting.profile,
        "profile_digest": digest,
        "estimated": setting.is_estimated,
        "ttft_target_s": setting.targets.ttft_s,
        "tbt_target_s": setting.targets.tbt_s,
        "seed": setting.seed,
        "policies": [played.to_json() for played in results],
    }
    write_parts(place, [json.dumps(document, indent=None if is_stdout(place) else 2), "\n"])
