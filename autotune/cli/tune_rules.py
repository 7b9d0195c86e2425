"""``autotune tune-rules``: thresholds found by search over the simulator."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from autotune.cli._places import check_places
from autotune.cli._shared import CliError, new_path
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

_WORKLOADS = "chat-bursty@1.2,chat-steady@1.1,code-bursty@1,chat-steady@0.5"
_TUNED = "tuned.yaml"


def register(app: typer.Typer) -> None:
    app.command("tune-rules", short_help="Search thresholds of rules by simulation.")(tune_rules)


def tune_rules(
    rules: Annotated[
        str, typer.Argument(metavar="FILE", help="Where to start: a rules file, or a preset.")
    ] = "default",
    *,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="DIR", help="tuned.yaml, and everything tried; resumes.", parser=new_path),
    ],
    workloads: Annotated[str, typer.Option(metavar="NAME@LOAD,...", help="Training workloads or traces.")] = _WORKLOADS,
    minutes: Annotated[float, typer.Option(help="Begin no further round after this long.")] = 20.0,
    rounds: Annotated[int, typer.Option(min=1, help="At most.")] = 30,
    candidates: Annotated[int, typer.Option(min=2, help="Per round.")] = 12,
    best: Annotated[int, typer.Option(min=1, help="Of a round, to draw the next one around.")] = 3,
    seeds: Annotated[int, typer.Option(min=1, help="Of each workload.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Of the search.")] = 0,
    profile: ProfileOption = None,
    duration: Annotated[float, typer.Option(help="Simulated seconds per seed.")] = 300.0,
    interval: IntervalOption = 2.0,
    length_scale: LengthScaleOption = 1.0,
    kv_pool_bytes: PoolOption = None,
    quality_budget: BudgetOption = 100 * USUAL_BUDGET,
    jobs: JobsOption = 0,
) -> None:
    """Search thresholds, delays and settings of RULES on training workloads, and write the best with its provenance.

    Every candidate meets the same requests; those that lint-rules objects to are not tried. Workloads that are held out
    for judging are refused. The same command goes on where it stopped.
    """
    from engine.errors import EngineError  # noqa: PLC0415  # slow imports, and not for --help
    from engine.sizes import parse_size  # noqa: PLC0415
    from engine.whole_file import write_whole  # noqa: PLC0415
    from envs.profile import read_profile  # noqa: PLC0415
    from envs.simulated import DEFAULT_PROFILE  # noqa: PLC0415
    from policies.evaluation.calibration import calibrate  # noqa: PLC0415
    from policies.evaluation.cells import Setup  # noqa: PLC0415
    from policies.evaluation.scenarios import Scenario, Span  # noqa: PLC0415
    from policies.evaluation.store import Store  # noqa: PLC0415
    from policies.executors import workers  # noqa: PLC0415
    from policies.rules import RuleError, load_rules, preset_text, presets  # noqa: PLC0415
    from policies.search import SearchPlan, search  # noqa: PLC0415

    begin_s, place = time.monotonic(), out / _TUNED
    try:
        if place.exists():
            check_places({"--out": place}, {"FILE": rules, "--profile": profile})
        check_limits(duration=duration, interval=interval, length_scale=length_scale, minutes=minutes)
        load_rules(rules)
        base = preset_text(rules) if rules in presets() else Path(rules).read_text(encoding="utf-8")
        scenarios = tuple(Scenario.parse(text.strip()) for text in workloads.split(","))
        plan = SearchPlan(scenarios, seeds, candidates, best, rounds, seed=seed)
        found, span = read_profile(profile or DEFAULT_PROFILE), Span(duration, length_scale)
        pool_bytes = None if kv_pool_bytes is None else parse_size(kv_pool_bytes)
        calibrations = calibrate(found, scenarios, span, pool_bytes=pool_bytes)
        setup = Setup(found, calibrations, span, interval, pool_bytes=pool_bytes, quality_budget=quality_budget / 100)
        with workers(jobs or os.cpu_count() or 1) as executor:
            result = search(
                base, plan, Store(out, setup), executor,
                out_of_time=lambda: time.monotonic() - begin_s > 60 * minutes,
                told=lambda turn, score, start: typer.echo(
                    f"round {turn}: best {score:.4f}, start {start:.4f}", err=True
                ),
            )  # fmt: skip
        write_whole(place, result.text)
    except RuleError as error:
        raise CliError("\n".join(error.problems), 2) from error
    except EngineError as error:
        raise CliError(str(error)) from error
    except ValueError as error:
        raise CliError(str(error), 2) from error
    except OSError as error:
        raise CliError(f"{error.filename or out}: {error.strerror}") from error
    better = "better than" if result.score > result.base_score else "no better than"
    typer.echo(
        f"{place}: {result.score:.4f}, {better} {rules} with {result.base_score:.4f}; {result.tried} candidates in "
        f"{result.rounds} rounds"
    )
