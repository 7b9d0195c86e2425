"""``autotune train``: a policy by reinforcement, from one's own traffic on a simulated engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli._shared import CliError, new_path
from autotune.cli._simulated import IntervalOption, LengthScaleOption, PoolOption, ProfileOption, TbtOption, TtftOption
from policies.usual_budget import USUAL_BUDGET

if TYPE_CHECKING:
    from policies.train.checkpoint import Progress as Where
    from policies.train.recipe import Recipe
    from policies.train.sweep import Job, Outcome

EXTRA = "training needs pip install 'kv-autotune[train]'"
_DEFAULT_MINUTES = 25.0


def register(app: typer.Typer) -> None:
    app.command("train", short_help="Train a policy on simulated traffic.")(train)


def train(
    *,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="RUN", help="Folder of the run.", parser=new_path)],
    algo: Annotated[str, typer.Option(help="maskable-ppo, ppo or dqn.")] = "maskable-ppo",
    trace: Annotated[list[Path] | None, typer.Option(help="A trace to train on; repeatable.")] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:PROMPTS:OUTPUTS][@RATE]",
            help="A built-in workload, its lengths and its rate multiplied; repeatable.",
        ),
    ] = None,
    profile: ProfileOption = None,
    kv_pool_bytes: PoolOption = None,
    knobs: Annotated[str | None, typer.Option(help="Knobs that it may move, with commas between them.")] = None,
    objective: Annotated[str, typer.Option(help="interactive or batch.")] = "interactive",
    ttft_target: TtftOption = None,
    tbt_target: TbtOption = None,
    length_scale: LengthScaleOption = 1.0,
    quality_budget: Annotated[
        float, typer.Option(help="Relative loss of a token that is allowed on average.")
    ] = USUAL_BUDGET,
    interval: IntervalOption = 2.0,
    steps: Annotated[int | None, typer.Option(help="Decisions to learn from, over all environments.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Or: for so long (25 if neither is given).")] = None,
    envs: Annotated[int, typer.Option(help="Simulated engines at the same time.")] = 8,
    group: Annotated[
        int | None, typer.Option(help="So many play the same traffic, each rewarded for being better (4; dqn 1).")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed and --steps give the same weights.")] = 0,
    teacher: Annotated[
        str, typer.Option(help="Whom to begin from: a preset, a rules file, predictor, or none.")
    ] = "default",
    advised: Annotated[
        bool, typer.Option("--advised/--alone", help="Show it what the teacher would do, to overrule or follow.")
    ] = False,
    lookahead: Annotated[
        bool | None,
        typer.Option("--lookahead/--no-lookahead", help="Try actions on copies of the engine first (not with dqn)."),
    ] = None,
    patience: Annotated[int, typer.Option(help="Stop after so many judgements without a better one.")] = 8,
    seeds: Annotated[
        int, typer.Option(min=1, help="So many runs with seeds from --seed on, in folders of their own.")
    ] = 1,
    sweep: Annotated[
        list[str] | None, typer.Option(metavar="KEY=V,V", help="Runs over values of the recipe; repeatable.")
    ] = None,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Each run a task of this Ray cluster; local for this machine.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where RUN stopped; its recipe holds.")] = False,
) -> None:
    """Train a policy behind the daemon's guard on a simulated engine, with the rules as a start and as the yardstick.

    RUN gets the recipe, checkpoints, metrics.jsonl, TensorBoard files, the best model and its held-out scores;
    autotune export makes a policy of it.
    """
    try:
        from policies.train import sweep as runs  # noqa: PLC0415  # torch, and not for --help
        from policies.train.folder import check_new  # noqa: PLC0415
        from policies.train.recipe import read_recipe  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise CliError(f"{error.name} is not installed; {EXTRA}") from error

    with _one_line():
        several = seeds > 1 or bool(sweep)
        if resume:
            if several:
                raise CliError("--resume goes on with one run: name its own folder", 2)
            recipe = read_recipe(out)
            _warn(recipe)
            found = [_single(runs.Job("", recipe, str(out), resume=True))]
        else:
            ends = (steps, _DEFAULT_MINUTES if steps is None and minutes is None else minutes)
            recipe = _recipe(
                algo=algo, sources=_sources(trace, workload), profile=profile and str(profile.resolve()),
                pool_bytes=_pool(kv_pool_bytes), knobs=None if knobs is None else _split(knobs), objective=objective,
                ttft_target_s=ttft_target, tbt_target_s=tbt_target,
                length_scale=length_scale, quality_budget=quality_budget, interval_s=interval,
                steps=ends[0], minutes=ends[1], envs=envs, group=group, seed=seed, teacher=teacher, advised=advised,
                patience=patience, lookahead=lookahead,
            )  # fmt: skip
            _warn(recipe)
            if several or ray is not None:
                _check_empty(out)
                jobs = runs.jobs_of(recipe, out, range(seed, seed + seeds), sweep or [])
                found = _several(runs.resolved_jobs(jobs), out, ray)
            else:
                check_new(out)
                found = [_single(runs.Job("", runs.resolved(recipe), str(out)))]
    _show(found)


def _recipe(
    *,
    algo: str,
    group: int | None,
    teacher: str,
    advised: bool,
    knobs: list[str] | None,
    lookahead: bool | None,
    **fields: Any,
) -> Recipe:
    """As it was asked for: checked, rates and targets still open."""
    from policies.train.recipe import Lookahead, Recipe, WarmStart, checked  # noqa: PLC0415

    given = {name: value for name, value in fields.items() if value is not None}
    if knobs is not None:
        given["knobs"] = knobs
    given["group"] = (1 if algo == "dqn" else min(4, fields["envs"])) if group is None else group
    ahead = Lookahead(then="advice" if advised else "nothing")
    given["lookahead"] = ahead if (algo != "dqn" if lookahead is None else lookahead) else None
    given["warm_start"], given["advised"] = None if teacher == "none" else WarmStart(teacher=teacher), advised
    return checked(Recipe.model_validate({"algo": algo, **given}))


def _sources(traces: list[Path] | None, workloads: list[str] | None) -> list[dict[str, Any]] | None:
    found: list[dict[str, Any]] = [{"trace": str(path.resolve())} for path in traces or ()]
    for text in workloads or ():
        shape, at, scale = text.partition("@")
        name, *lengths = shape.split(":")
        try:
            prompts, outputs = (float(length) for length in lengths or ("1", "1"))
            found.append(
                {
                    "workload": name,
                    "rate_scale": float(scale) if at else None,
                    "prompt_scale": prompts,
                    "output_scale": outputs,
                }
            )
        except ValueError:
            raise CliError(f"--workload {text}: write NAME, NAME@RATE or NAME:PROMPTS:OUTPUTS@RATE", 2) from None
    return found or None


def _warn(recipe: Recipe) -> None:
    """Of traffic that evaluation keeps for judging."""
    from policies.split import HELD_OUT, TRAINING  # noqa: PLC0415

    kept = [name for name in HELD_OUT if any(source.workload == name for source in recipe.sources)]
    if kept:
        typer.echo(
            f"warning: {', '.join(kept)} held out for judging: what has learnt from it is judged too well there; "
            f"to train on: {', '.join(TRAINING)}",
            err=True,
        )


def _pool(text: str | None) -> int | None:
    from engine.sizes import parse_size  # noqa: PLC0415

    return None if text is None else parse_size(text)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


@contextmanager
def _one_line() -> Iterator[None]:
    """What a user can mend as one line."""
    from pydantic import ValidationError  # noqa: PLC0415

    from engine.errors import EngineError  # noqa: PLC0415
    from policies.card import PolicyFileError  # noqa: PLC0415
    from policies.executors import RayUnavailableError  # noqa: PLC0415

    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        raise CliError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}", 2) from error
    except (PolicyFileError, EngineError, RayUnavailableError) as error:
        raise CliError(str(error)) from error
    except ValueError as error:
        raise CliError("; ".join(str(error).splitlines()), 2) from error
    except OSError as error:
        raise CliError(f"{error.filename}: {error.strerror}" if error.filename else str(error)) from error


def _single(job: Job) -> Outcome:
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn  # noqa: PLC0415

    from policies.train.sweep import run  # noqa: PLC0415

    console, recipe = Console(stderr=True, highlight=False), job.recipe
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        total = recipe.steps or 60 * (recipe.minutes or 0.0)
        task, tell_again, began_s = bar.add_task("warm start", total=total), _Pace(), time.monotonic()

        def tell(progress: Where, text: str) -> None:
            if text:
                console.print(text, markup=False, soft_wrap=True)
            if text or tell_again():
                done = progress.steps if recipe.steps else time.monotonic() - began_s
                bar.update(task, completed=done, description=f"{progress.steps} steps")

        return run(job, tell)


class _Pace:
    """True a few times a second."""

    def __init__(self) -> None:
        self._last_s = 0.0

    def __call__(self) -> bool:
        now_s = time.monotonic()
        if now_s - self._last_s < 0.3:
            return False
        self._last_s = now_s
        return True


def _check_empty(folder: Path) -> None:
    if folder.exists() and any(folder.iterdir()):
        raise CliError(f"{folder} is not empty; choose another folder")


def _several(jobs: list[Job], folder: Path, address: str | None) -> list[Outcome]:
    from policies.executors import workers  # noqa: PLC0415
    from policies.train.sweep import run_all  # noqa: PLC0415

    with workers(1, address) as executor:  # here one after the other: a run's environments are processes already
        return run_all(jobs, executor, folder)


def _show(found: list[Outcome]) -> None:
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    console = Console(highlight=False)
    for outcome in found:
        table = Table("policy", "figure", "mean", "95 % interval", box=None, title_justify="left")
        table.title = f"{outcome.folder}: best at {outcome.steps} steps, ended because {outcome.stopped}"
        for row in outcome.scores:
            table.add_row(row["policy"], row["figure"], f"{row['mean']:.4g}", f"{row['low']:.4g} to {row['high']:.4g}")
        console.print(table)
    console.print(f"next: autotune export {found[0].folder} -o policy/", markup=False, soft_wrap=True)
