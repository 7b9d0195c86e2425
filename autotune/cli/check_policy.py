"""``autotune check-policy``: does a policy hold still under constant load, and does nothing forbidden get through?"""

from __future__ import annotations

import json
import os
import random
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli._shared import CliError, tell_choice
from autotune.cli._simulated import IntervalOption, JobsOption, NoiseOption, ProfileOption, check_limits

if TYPE_CHECKING:
    from policies.base import Policy
    from policies.play import Contender


def register(app: typer.Typer) -> None:
    app.command("check-policy", short_help="Check a policy's calm and its bounds.")(check_policy)


def check_policy(
    policy: Annotated[str, typer.Argument(help="A preset, a rules file, predictor, learned:PATH or auto.")] = "default",
    *,
    profile: ProfileOption = None,
    hours: Annotated[
        float, typer.Option(help="Simulated hours at each level; 24 for a verdict, 0: leave it out.")
    ] = 1.0,
    levels: Annotated[int, typer.Option(min=1, help="Levels of load, up to twice what native serves.")] = 20,
    noise: NoiseOption = 0.05,
    interval: IntervalOption = 2.0,
    with_spikes: Annotated[
        bool, typer.Option("--spikes/--no-spikes", help="Loads that treble; minutes where the policy is late.")
    ] = True,
    ticks: Annotated[int, typer.Option(min=0, help="Fuzzed ticks; 1000000 for a verdict.")] = 10_000,
    engine_ticks: Annotated[int, typer.Option(min=0, help="Fuzzed ticks with a simulated engine behind.")] = 300,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    jobs: JobsOption = 0,
) -> None:
    """Checks of POLICY behind the guard. Exit code 1 when one fails; the last line is JSON.

    Calm: at every level of a load that holds still, at most one change after five minutes, and none of them back.
    Spikes: when the load trebles, back inside the targets within ten seconds wherever foresight is.
    Fuzz: broken telemetry, and a random policy beside POLICY; no exception, no action outside its bounds, no request
    lost or preempted because of an action.
    """
    from rich.console import Console  # noqa: PLC0415

    from autotune.simulation.progress import StageBars  # noqa: PLC0415
    from engine.errors import EngineError  # noqa: PLC0415
    from envs.profile import read_profile  # noqa: PLC0415
    from envs.simulated import DEFAULT_PROFILE  # noqa: PLC0415
    from policies.constant_load import constant_load  # noqa: PLC0415
    from policies.constant_load import levels as spread  # noqa: PLC0415
    from policies.executors import workers  # noqa: PLC0415
    from policies.fuzz import Fuzzed, RandomPolicy, fuzz_decisions, fuzz_engine  # noqa: PLC0415
    from policies.named import World, contender  # noqa: PLC0415
    from policies.spike import BASES, spikes  # noqa: PLC0415
    from policies.steady import Bench, SteadyLoad  # noqa: PLC0415

    result: dict[str, Any] = {"policy": policy, "levels": [], "spikes": [], "fuzz": {}}
    try:
        check_limits(hours=hours, interval=interval)
        found = read_profile(profile or DEFAULT_PROFILE)
        chosen = _moving(contender(policy, World(found)))
        tell_choice(chosen)
        with StageBars(Console(stderr=True, highlight=False)) as progress:
            bench = Bench.of(found, SteadyLoad(noise=noise)) if hours or with_spikes else None
            if hours and bench is not None:
                progress.stage(f"{levels} levels of {hours:g} h", levels)
                with workers(jobs or os.cpu_count() or 1) as executor:
                    held = constant_load(
                        bench, policy, executor, shares=spread(levels), hours=hours, interval_s=interval, seed=seed,
                        done=progress.done,
                    )  # fmt: skip
                result["levels"] = [level.to_json() for level in held]
            if with_spikes and bench is not None:
                progress.stage("load times three", len(BASES))
                with workers(jobs or os.cpu_count() or 1) as executor:
                    met = spikes(bench, policy, executor, interval_s=interval, seed=seed, done=progress.done)
                result["spikes"] = [one.to_json() for one in met]
            fuzzed: dict[str, tuple[Policy, Any, int]] = {
                "random": (RandomPolicy(random.Random(seed)), fuzz_decisions, ticks),
                "policy": (chosen, fuzz_decisions, ticks),
                "random_engine": (RandomPolicy(random.Random(seed)), fuzz_engine, engine_ticks),
                "policy_engine": (chosen, fuzz_engine, engine_ticks),
            }
            for name, (who, fuzz, number) in fuzzed.items():
                progress.stage(f"fuzz: {name}", number)
                one: Fuzzed = fuzz(who, number, seed, found, lambda _: progress.done())
                result["fuzz"][name] = one.to_json()
    except EngineError as error:
        raise CliError(str(error)) from error
    except ValueError as error:
        raise CliError(str(error), 2) from error
    calm = [level for level in result["levels"] if not level["is_still"]]
    dirty = [name for name, one in result["fuzz"].items() if not one["is_clean"]]
    late = [one for one in result["spikes"] if not one["is_met"]]
    for missed in late:
        typer.echo(
            f"spike from {missed['base']:g}: back after {_seconds(missed['policy_s'])}, with foresight "
            f"{_seconds(missed['oracle_s'])}"
        )
    for level in calm:
        typer.echo(f"load {level['level']:g}: {level['changes']} changes, {level['reversals']} back: {level['knobs']}")
    for name in dirty:
        typer.echo(f"fuzz {name}: {result['fuzz'][name]['first_problem']}")
    result["reversals"] = sum(level["reversals"] for level in result["levels"]) if result["levels"] else None
    result["hours"] = hours
    result["passed"] = not calm and not late and not dirty
    typer.echo(json.dumps(result))
    if not result["passed"]:
        raise typer.Exit(1)


def _seconds(after_s: float | None) -> str:
    return "never" if after_s is None else f"{after_s:g} s"


def _moving(who: Contender) -> Policy:
    if who.policy is None:
        raise ValueError(f"{who.name}: a setting that never changes needs no check")
    return who.policy
