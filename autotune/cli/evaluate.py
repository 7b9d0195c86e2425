"""``autotune evaluate``: policies against each other and against what never changes, on held-out workloads."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli._shared import CliError, new_path, tell_choice
from autotune.cli._simulated import (
    BudgetOption,
    IntervalOption,
    JobsOption,
    LengthScaleOption,
    PoolOption,
    ProfileOption,
    check_limits,
)
from policies.usual_budget import USUAL_BUDGET

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from autotune.simulation.progress import StageBars
    from envs.profile import Profile
    from policies.evaluation.cells import Setup
    from policies.evaluation.experiment import Plan, Results
    from policies.executors import Executor

_WIDE = 200
_LEVELS = 20
_REPORT, _RESULT, _VERDICT = "report.html", "evaluation.json", "verdict.json"


def register(app: typer.Typer) -> None:
    app.command("evaluate", short_help="Judge policies on held-out workloads.")(evaluate)


def evaluate(
    policies: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Presets, rules files, predictor, learned:PATH, auto. Absent: presets and predictor.",
        ),
    ] = None,
    *,
    workloads: Annotated[
        str | None,
        typer.Option(metavar="NAME[@LOAD],...", help="Absent: held-out ones. LOAD: of what native serves; or xTIMES."),
    ] = None,
    trace: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A trace besides, at half and 1.2 times what native serves."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Of each workload; 10 for a verdict.")] = 10,
    profile: ProfileOption = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Results; an interrupted run goes on.", parser=new_path)
    ],
    duration: Annotated[float, typer.Option(help="Simulated seconds of arrivals per seed.")] = 600.0,
    interval: IntervalOption = 2.0,
    length_scale: LengthScaleOption = 1.0,
    kv_pool_bytes: PoolOption = None,
    statics: Annotated[str, typer.Option(metavar="few|grid|NAME;...", help="Static settings to compare with.")] = "few",
    random: Annotated[int, typer.Option(min=0, help="Settings that random search tries.")] = 0,
    oracle_seeds: Annotated[int, typer.Option(min=0, help="Seeds on which the oracle plays (slow).")] = 0,
    cost_seeds: Annotated[int, typer.Option(min=0, help="Seeds of the cost at equal attainment; 0: leave it out.")] = 3,
    attainment: Annotated[float, typer.Option(min=0.01, max=1, help="Level at which costs are compared.")] = 0.9,
    price: Annotated[float, typer.Option(help="Of a device per hour.")] = 1.0,
    quality_budget: BudgetOption = 100 * USUAL_BUDGET,
    constant_hours: Annotated[
        float, typer.Option(min=0, help="Hours of the best policy at each of 20 constant loads; 0: leave it out.")
    ] = 0.0,
    ablation: Annotated[bool, typer.Option(help="Freeze each knob of the best policy in turn.")] = True,
    jobs: JobsOption = 0,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Each cell a task of this Ray cluster; local: this machine."),
    ] = None,
    json_line: Annotated[bool, typer.Option("--json-line", help="Print the headline as JSON, last.")] = False,
) -> None:
    """Play policies and static settings through the same simulated traffic, and say which is better by how much.

    Targets are set beforehand: 5 times the first token and 2.5 times the gap of requests that have native storage to
    themselves. DIR gets evaluation.json, report.html, verdict.json (what auto goes by) and every finished cell; the
    same command goes on where it stopped.
    """
    from rich.console import Console  # noqa: PLC0415  # slow imports, and not for --help

    from autotune.simulation.evaluation_report import write_html  # noqa: PLC0415
    from autotune.simulation.progress import StageBars  # noqa: PLC0415
    from engine.errors import EngineError  # noqa: PLC0415
    from engine.sizes import parse_size  # noqa: PLC0415
    from engine.whole_file import write_whole  # noqa: PLC0415
    from envs.profile import read_profile  # noqa: PLC0415
    from envs.simulated import DEFAULT_PROFILE  # noqa: PLC0415
    from policies.evaluation.calibration import calibrate  # noqa: PLC0415
    from policies.evaluation.cells import Setup  # noqa: PLC0415
    from policies.evaluation.document import document  # noqa: PLC0415
    from policies.evaluation.experiment import run  # noqa: PLC0415
    from policies.evaluation.figures import Terms  # noqa: PLC0415
    from policies.evaluation.scenarios import Span  # noqa: PLC0415
    from policies.evaluation.store import Store  # noqa: PLC0415
    from policies.executors import RayUnavailableError, workers  # noqa: PLC0415

    console = Console(stderr=True, highlight=False)
    if ray is not None and jobs:
        raise CliError("--jobs counts processes of this machine; leave it out with --ray", 2)
    try:
        found = read_profile(profile or DEFAULT_PROFILE)
        pool_bytes = None if kv_pool_bytes is None else parse_size(kv_pool_bytes)
        check_limits(duration=duration, interval=interval, length_scale=length_scale)
        check_limits(price=price, constant_hours=constant_hours)
        plan = _plan(
            found, pool_bytes, policies, _with_traces(workloads, trace or []), statics, seeds=seeds, random=random,
            oracle_seeds=oracle_seeds, cost_seeds=cost_seeds, ablation=ablation, quality_budget=quality_budget / 100,
        )  # fmt: skip
        span = Span(duration, length_scale)
        with workers(jobs or os.cpu_count() or 1, ray) as executor, StageBars(console) as progress:
            progress.stage("targets and capacity", 1)
            calibrations = calibrate(found, plan.scenarios, span, pool_bytes=pool_bytes)
            progress.done()
            setup = Setup(
                found, calibrations, span, interval, pool_bytes=pool_bytes, quality_budget=plan.quality_budget
            )
            results = run(plan, Store(out, setup), executor, progress)
            calm = _calm(setup, results.best_policy, constant_hours, executor, progress)
        result = document(setup, plan, results, Terms(attainment, price))
        result["headline"]["reversals_24h"] = calm
        _show(console if json_line else Console(highlight=False), result)
        write_whole(out / _RESULT, json.dumps(result, indent=1) + "\n")
        write_html(result, out / _REPORT)
        _write_verdict(out / _VERDICT, setup, plan, results, result)
    except (EngineError, RayUnavailableError) as error:
        raise CliError(str(error)) from error
    except ValueError as error:
        raise CliError(str(error), 2) from error
    except OSError as error:
        raise CliError(f"{error.filename or out}: {error.strerror}") from error
    console.print(f"report: {out / _REPORT}", markup=False, soft_wrap=True)
    if json_line:
        typer.echo(json.dumps(result["headline"]))


def _write_verdict(place: Path, setup: Setup, plan: Plan, results: Results, result: dict[str, Any]) -> None:
    """The verdict of who may decide; one of an earlier run goes, where nobody who could be judged was played."""
    from engine.whole_file import write_whole  # noqa: PLC0415
    from policies.evaluation.judged import judged  # noqa: PLC0415
    from policies.profile_verdict import verdict_text  # noqa: PLC0415

    now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
    verdict = judged(setup, plan, results, result["overall"]["interactive"], created=now, program=_version())
    if verdict is None:
        place.unlink(missing_ok=True)
    else:
        write_whole(place, verdict_text(verdict))


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415  # slow

    try:
        return version("kv-autotune")
    except PackageNotFoundError:
        return "unknown"


def _plan(
    profile: Profile,
    pool_bytes: int | None,
    policies: str | None,
    workloads: Sequence[str],
    statics: str,
    *,
    random: int,
    ablation: bool,
    **options: Any,
) -> Plan:
    from engine.tunables import TUNABLES  # noqa: PLC0415
    from policies.evaluation.experiment import ABLATED, Plan  # noqa: PLC0415
    from policies.evaluation.offered import Offered  # noqa: PLC0415
    from policies.evaluation.scenarios import Scenario  # noqa: PLC0415
    from policies.evaluation.statics import few, grid, random_settings  # noqa: PLC0415
    from policies.named import World, bundled, contender  # noqa: PLC0415

    scenarios = tuple(Scenario.parse(text) for text in workloads)
    names = tuple(_names(policies) if policies else bundled())
    for name in names:
        # A mistake is said before anything runs.
        tell_choice(contender(name, World(profile, quality_budget=options["quality_budget"])).policy)
    offered = Offered(profile, pool_bytes)
    if statics in {"few", "grid"}:
        settings = few(offered) if statics == "few" else grid(offered)
    else:
        settings = [contender(text).values for text in _names(statics, ";")]
    # A knob that the engine does not offer cannot be missed.
    movable = [knob for knob in ABLATED if any(offered({knob: value}) for value in TUNABLES[knob].values[1:])]
    return Plan(
        scenarios,
        names,
        tuple(settings),
        ablated=tuple(movable) if ablation else (),
        random=tuple(random_settings(random, 0, offered)),
        **options,
    )


def _with_traces(workloads: str | None, traces: Sequence[Path]) -> list[str]:
    from policies.evaluation.scenarios import DEFAULT, LOADS  # noqa: PLC0415

    return [*(_names(workloads) if workloads else DEFAULT), *(f"{trace}@{load}" for trace in traces for load in LOADS)]


def _calm(
    setup: Setup, name: str | None, hours: float, executor: Executor, progress: StageBars
) -> dict[str, float] | None:
    """Changes back to where a knob was under constant loads, and over how much time they were looked for."""
    from policies.constant_load import constant_load, levels  # noqa: PLC0415
    from policies.steady import Bench, SteadyLoad  # noqa: PLC0415

    if name is None or not hours:
        return None
    progress.stage("constant loads", _LEVELS)
    bench = Bench.of(setup.profile, SteadyLoad(), setup.pool_bytes)
    held = constant_load(
        bench, name, executor, shares=levels(_LEVELS), hours=hours, interval_s=setup.interval_s, done=progress.done
    )
    return {
        "value": sum(one.reversals for one in held),
        "most_changes": max(one.changes for one in held),
        "levels": _LEVELS,
        "hours_each": hours,
    }


def _names(text: str, separator: str = ",") -> list[str]:
    """``a,b``; a static's own commas stay with it."""
    names: list[str] = []
    for part in text.split(separator):
        if names and names[-1].startswith("static:") and "=" in part and ":" not in part:
            names[-1] += f",{part.strip()}"
        elif part.strip():
            names.append(part.strip())
    return list(dict.fromkeys(names))


def _show(console: Console, result: dict[str, Any]) -> None:
    from rich.table import Table  # noqa: PLC0415

    from autotune.simulation.evaluation_report import cost_rows, overall_rows, workload_rows  # noqa: PLC0415

    if not console.is_terminal:
        console.width = _WIDE  # a file has no edge to wrap at
    for note in result["notes"]:
        console.print(note, markup=False, soft_wrap=True)
    tables = [
        ("interactive", overall_rows(result, "interactive")), ("batch", overall_rows(result, "batch")),
        ("by workload", workload_rows(result)), *([("cost", cost_rows(result))] if result["costs"] else []),
    ]  # fmt: skip
    for title, (header, rows) in tables:
        console.print(f"\n{title}", markup=False)
        table = Table(box=None, pad_edge=False)
        for number, name in enumerate(header):
            table.add_column(name, justify="left" if number == 0 else "right", overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    console.print(f"\n{result['verdict']}", markup=False, soft_wrap=True)
