"""``autotune trace``: import, inspect, list and generate traces."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli._shared import CliError, new_path

if TYPE_CHECKING:
    from rich.console import Console

    from envs.workload.generators import Workload
    from envs.workload.statistics import Summary
    from envs.workload.trace import Trace

_INSPECTED_S = 3600.0  # of a built-in workload
_MOST_INSPECTED_S = 604_800.0  # of one: it is made in memory
_LEAST, _MOST_S = 1e-6, 31_536_000.0  # of a rate or a duration; a year

OutOption = Annotated[
    Path,
    typer.Option("--out", "-o", metavar="FILE", help="CSV to write; gzip if it ends in .gz.", parser=new_path),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace an existing file.")]
SkipOption = Annotated[bool, typer.Option("--skip-bad-lines", help="Count broken lines, go on.")]


def register(app: typer.Typer) -> None:
    trace = typer.Typer(help="Import, inspect, list and generate traces.", rich_markup_mode=None)
    trace.command("import", short_help="Make a trace of a table of yours.")(import_trace)
    trace.command("inspect", short_help="Statistics and a plot.")(inspect)
    trace.command("list", short_help="The built-in workloads.")(list_workloads)
    trace.command("generate", short_help="Write a built-in workload as a file.")(generate)
    app.add_typer(trace, name="trace", short_help="Import, inspect, list and generate traces.")


def import_trace(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="CSV or JSON lines, gzip or not.")],
    *,
    out: OutOption,
    columns: Annotated[
        str, typer.Option(metavar="ROLE=COLUMN,...", help="Which column is arrival, prompt, output, hashes, source.")
    ] = "",
    unit: Annotated[str, typer.Option(help="Unit of the arrival column: s, ms, us or ns.")] = "s",
    block_tokens: Annotated[float, typer.Option(help="Tokens per block of the hashes column.")] = 0.0,
    rate: Annotated[float | None, typer.Option(help="Poisson arrivals per second for a table without times.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of those arrivals.")] = 0,
    skip_bad_lines: SkipOption = False,
    force: ForceOption = False,
) -> None:
    """Make a trace of FILE: sorted, from 0 s, in the form that every command here reads.

    Arrivals are numbers of --unit, or dates and times. Without --columns FILE has to be in a form that is known: Azure,
    BurstGPT, Mooncake, a recording of `autotune engine --record` or of `autotune record-proxy`. Example:
    --columns arrival=ts,prompt=in_tokens,output=out_tokens
    """
    from envs.workload.forms import chosen  # noqa: PLC0415  # slow imports, and not for --help
    from envs.workload.loaders import load_trace  # noqa: PLC0415
    from envs.workload.trace import TraceError  # noqa: PLC0415
    from envs.workload.writer import write_trace  # noqa: PLC0415

    try:
        form = chosen(_roles(columns), unit=unit, block_tokens=block_tokens) if columns else None
        _check_rate(rate)
    except ValueError as error:
        raise CliError(str(error), 2) from None
    try:
        trace = load_trace(file, skip_bad_lines=skip_bad_lines, rate_rps=rate, seed=seed, form=form)
        number = write_trace(out, trace.requests, block_tokens=trace.block_tokens, force=force)
    except TraceError as error:
        raise CliError(str(error)) from None
    for note in trace.notes:
        typer.echo(f"note: {note}")
    typer.echo(f"{out}: {number} requests in {trace.duration_s:.6g} s")


def inspect(
    trace: Annotated[str, typer.Argument(metavar="TRACE", help="A trace file or a built-in workload.")],
    *,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw it, as .png, .svg or .pdf (needs matplotlib).", parser=new_path),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    start: Annotated[float, typer.Option(min=0, help="Leave out what arrives before, in seconds.")] = 0.0,
    duration: Annotated[float | None, typer.Option(help="Seconds to look at, from --start on.")] = None,
    rate: Annotated[float | None, typer.Option(help="Poisson arrivals per second for a file without times.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of generated workloads and arrivals.")] = 0,
    skip_bad_lines: SkipOption = False,
) -> None:
    """Say what a trace is like: rate, burstiness, length percentiles, and how much of its prompts repeats.

    `hit ratio` is the share of prompt tokens that a prefix cache without bounds would have, where the trace has hashes.
    """
    from rich.console import Console  # noqa: PLC0415  # slow imports, and not for --help

    from envs.workload.splits import window  # noqa: PLC0415
    from envs.workload.statistics import summarise  # noqa: PLC0415
    from envs.workload.trace import TraceError  # noqa: PLC0415

    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise CliError("--plot needs matplotlib: pip install 'kv-autotune[plots]', or leave --plot out")
    try:
        _check_rate(rate)
        _check("--duration", duration, _MOST_S)
    except ValueError as error:
        raise CliError(str(error), 2) from None
    try:
        loaded = _load(trace, skip_bad_lines=skip_bad_lines, rate=rate, seed=seed, until_s=start + (duration or 0.0))
        if start or duration is not None:
            loaded = window(loaded, start, float("inf") if duration is None else start + duration)
        summary = summarise(loaded)
    except TraceError as error:
        raise CliError(str(error)) from None
    if as_json:
        typer.echo(json.dumps(summary.to_json()))
    else:
        _print_summary(Console(highlight=False), summary)
    if plot is not None:
        from autotune.trace_plot import plot_trace  # noqa: PLC0415

        try:
            plot_trace(loaded, summary, plot)
        except (OSError, ValueError) as error:  # ValueError: a format that matplotlib does not know
            raise CliError(f"{plot}: cannot be drawn: {getattr(error, 'strerror', None) or error}") from None


def list_workloads(
    *, as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False
) -> None:
    """List the built-in workloads: what each is, what it is hard for, and what it was fitted to."""
    from rich.console import Console  # noqa: PLC0415

    from envs.workload.catalogue import CATALOGUE  # noqa: PLC0415

    if as_json:
        rows = [
            {
                "name": workload.name,
                "description": workload.description,
                "stresses": workload.stresses,
                "fitted_to": workload.fitted_to,
                "mean_rps": workload.mean_rps,
                "prompt_median": workload.prompt.median,
                "output_median": workload.output.median,
                "shares_prefixes": workload.sessions is not None,
            }
            for workload in CATALOGUE.values()
        ]
        typer.echo(json.dumps(rows))
        return
    print_catalogue(Console(highlight=False))


def print_catalogue(console: Console) -> None:
    """The catalogue for people."""
    from envs.workload.catalogue import CATALOGUE  # noqa: PLC0415

    for name, workload in CATALOGUE.items():
        console.print(f"{name}: {workload.description}", style="bold", markup=False, soft_wrap=True)
        console.print(
            f"    {workload.mean_rps:.2g} requests/s, median prompt {workload.prompt.median:.0f} and output "
            f"{workload.output.median:.0f} tokens{', shared prefixes' if workload.sessions else ''}",
            markup=False,
            soft_wrap=True,
        )
        console.print(f"    stresses {workload.stresses}", markup=False, soft_wrap=True)
        console.print(f"    fitted to {workload.fitted_to}", markup=False, style="dim", soft_wrap=True)


def generate(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A built-in workload (autotune trace list).")],
    *,
    out: OutOption,
    duration: Annotated[float, typer.Option(help="Seconds; a week is 604800.")] = 3600.0,
    rate: Annotated[
        float | None, typer.Option(help="Mean requests per second, in place of the workload's own.")
    ] = None,
    envelope: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Rate over time (columns t_s, rps), in place of the workload's own."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same trace.")] = 0,
    force: ForceOption = False,
) -> None:
    """Write a built-in workload as a trace, however long, in little memory.

    --envelope takes rates that someone else measured: a digitised plot, or ServeGen's windows with their burstiness.
    """
    from dataclasses import replace  # noqa: PLC0415

    from envs.workload.envelopes import load_envelope  # noqa: PLC0415
    from envs.workload.generators import at_least_one, stream  # noqa: PLC0415
    from envs.workload.trace import TraceError  # noqa: PLC0415
    from envs.workload.writer import write_trace  # noqa: PLC0415

    workload = _builtin(name)
    try:
        _check_rate(rate)
        _check("--duration", duration, _MOST_S)
    except ValueError as error:
        raise CliError(str(error), 2) from None
    if envelope is not None and workload.then:
        raise CliError(f"{name} changes its rate with its kind and takes no --envelope", 2)
    try:
        if envelope is not None:
            loaded = load_envelope(envelope)
            workload = replace(workload, rate=loaded.envelope)
            for note in loaded.notes:
                typer.echo(f"note: {envelope.name}: {note}")
        factor = 1.0 if rate is None else rate / workload.mean_rps
        requests = stream(workload, duration_s=duration, seed=seed, rate_scale=factor)
        requests = at_least_one(requests, f"{name}: nothing arrives in {duration:g} s")
        block = max(regime.block_tokens for regime in workload.regimes)
        number = write_trace(out, requests, block_tokens=block, force=force)
    except TraceError as error:
        raise CliError(str(error)) from None
    typer.echo(f"{out}: {number} requests in {duration:g} s, seed {seed}")


def _builtin(name: str) -> Workload:
    from envs.workload.catalogue import CATALOGUE  # noqa: PLC0415

    if name not in CATALOGUE:
        raise CliError(f"{name!r} is not built in; choose one of {', '.join(CATALOGUE)}", 2)
    return CATALOGUE[name]


def _load(name: str, *, skip_bad_lines: bool, rate: float | None, seed: int, until_s: float) -> Trace:
    from envs.workload.catalogue import CATALOGUE  # noqa: PLC0415
    from envs.workload.generators import generate as generate_trace  # noqa: PLC0415
    from envs.workload.loaders import load_trace  # noqa: PLC0415

    path = Path(name)
    if name in CATALOGUE and not path.exists():
        if until_s > _MOST_INSPECTED_S:
            raise CliError(f"{name} is built in: look at {_MOST_INSPECTED_S:g} s of it at most", 2)
        workload = CATALOGUE[name]
        factor = 1.0 if rate is None else rate / workload.mean_rps
        return generate_trace(workload, duration_s=max(_INSPECTED_S, until_s), seed=seed, rate_scale=factor)
    if not path.is_file():
        raise CliError(f"{name}: no such file, nor a built-in workload ({', '.join(CATALOGUE)})", 2)
    return load_trace(path, skip_bad_lines=skip_bad_lines, rate_rps=rate, seed=seed)


def _roles(text: str) -> dict[str, str]:
    roles = {}
    for part in text.split(","):
        role, equals, column = part.partition("=")
        if not equals or not role.strip() or not column.strip():
            raise ValueError(f"--columns: expected ROLE=COLUMN, got {part!r}")
        if role.strip() in roles:
            raise ValueError(f"--columns names {role.strip()} twice")
        roles[role.strip()] = column
    return roles


def _check_rate(rate: float | None) -> None:
    from envs.workload.arrivals import MOST_RPS  # noqa: PLC0415

    _check("--rate", rate, MOST_RPS)


def _check(name: str, value: float | None, most: float) -> None:
    if value is not None and not _LEAST <= value <= most:
        raise ValueError(f"{name} must be from {_LEAST:g} to {most:g}, got {value:g}")


def _print_summary(console: Console, summary: Summary) -> None:
    from rich.table import Table  # noqa: PLC0415

    def figure(value: float | None, unit: str = "") -> str:
        return "unknown" if value is None else f"{value:,.4g}{unit}"

    table = Table(title=summary.name, show_header=False, box=None)
    rows: list[tuple[str, Any]] = [
        ("requests", f"{summary.requests:,} in {summary.duration_s:,.1f} s"),
        ("mean rate", figure(summary.mean_rps, " requests/s")),
        *((f"busiest {window} s", figure(peak, " requests/s")) for window, peak in summary.peak_rps.items()),
        ("CV of gaps", f"{figure(summary.gap_cv)} (1: Poisson)"),
        *((f"dispersion, {window} s", figure(value)) for window, value in summary.dispersion.items()),
        ("prompt tokens", _percentiles(summary.prompt)),
        ("output tokens", _percentiles(summary.output)),
        ("tokens in all", f"{summary.prompt_tokens:,} in, {summary.output_tokens:,} out"),
        (
            "hit ratio, unlimited",
            "no hashes" if summary.hit_ratio is None else f"{summary.hit_ratio:.1%} of prompt tokens",
        ),
        ("sources", f"{summary.sources:,}" if summary.sources else "not told"),
    ]
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)
    for note in summary.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True, style="dim")


def _percentiles(figures: dict[str, float]) -> str:
    return " · ".join(f"{name} {value:,.0f}" for name, value in figures.items())
