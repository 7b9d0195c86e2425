"""``autotune profile``: what a simulation needs to know about a model on a device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli._places import check_places
from autotune.cli._shared import CliError, given_path, new_path

if TYPE_CHECKING:
    from envs.profile import Profile

_FEW_READINGS = 5
_BETTER = {
    "measured": "measure again on a machine that does nothing else, without --quick",
    "metrics": "watch again for longer, while the load changes",
}


def register(app: typer.Typer) -> None:
    app.command("profile", short_help="Measure a model for simulations.")(profile)


def profile(
    model: Annotated[
        Path,
        typer.Argument(help="Model folder; a config.json will do with --analytic.", metavar="MODEL", parser=given_path),
    ],
    *,
    out: Annotated[
        Path, typer.Option("-o", "--out", help="Where to write it.", metavar="FILE", parser=new_path)
    ] = Path("profile.yaml"),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer loads: under a minute for a small model.")] = False,
    analytic: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE",
            help="Estimate from a data sheet: H200, H100, A100 or L4. With --from-metrics: all that the server's "
            "metrics do not tell.",
        ),
    ] = None,
    from_metrics: Annotated[
        str | None, typer.Option(metavar="URL", help="Fit to a running server's /metrics (vLLM's or ours).")
    ] = None,
    duration: Annotated[float, typer.Option(min=1, max=604_800, help="Seconds to watch the server.")] = 120.0,
    every: Annotated[float, typer.Option(min=0.01, max=3600, help="Seconds between two readings.")] = 5.0,
    kv_pool_bytes: Annotated[
        str | None, typer.Option(metavar="N", help="KV pool, like 64M or 2G; 256M if absent, where it is measured.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    threads: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Processor threads, as the engine gets them.")
    ] = None,
    quality: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Quality table of autotune compare-formats to include.", parser=given_path),
    ] = None,
) -> None:
    """Measure how long MODEL's steps take on this machine and write a profile for autotune simulate.

    --analytic and --from-metrics estimate instead of measuring, and say so wherever the profile is used.
    """
    from engine.errors import EngineError  # noqa: PLC0415  # imports that --help need not wait for
    from engine.sizes import parse_size  # noqa: PLC0415
    from envs.profile import POOR_FIT  # noqa: PLC0415

    try:
        pool_bytes = None if kv_pool_bytes is None else parse_size(kv_pool_bytes)
    except ValueError as error:
        raise CliError(f"--kv-pool-bytes: {error}", 2) from None
    check_places({"--out": out}, {"MODEL": model, "--quality": quality})
    try:
        if from_metrics is None and analytic is None:
            found = _measure(model, pool_bytes or 256 << 20, device, dtype, threads, quick=quick)
        else:
            found = _estimate(model, analytic, pool_bytes, from_metrics, duration, every)
        found = _write(found, out, quality, model)
    except EngineError as error:
        raise CliError(str(error)) from error
    except ModuleNotFoundError as error:
        raise CliError(f"{error.name} is not installed; measuring needs pip install 'kv-autotune[engine]'") from error
    except OSError as error:
        raise CliError(f"{out}: cannot be written: {error.strerror}") from error
    if from_metrics is not None and analytic is None:
        typer.echo(
            f"warning: all that the metrics do not tell is estimated from {found.device.name}'s data sheet; name the "
            "device with --analytic",
            err=True,
        )
    for name, fit in found.poor_fits.items():
        typer.echo(
            f"warning: {name}: half of the samples that were held out are off by more than {fit.median:.0%}, so what "
            f"is simulated with this profile will be (usual: less than {POOR_FIT:.0%}); {_BETTER[found.source]}",
            err=True,
        )
    _show(found, out)


def _measure(model: Path, pool_bytes: int, device: str, dtype: str, threads: int | None, *, quick: bool) -> Profile:
    from rich.console import Console  # noqa: PLC0415

    from autotune.waiting import counting  # noqa: PLC0415
    from engine.models.folder import check_folder  # noqa: PLC0415

    check_folder(model)
    with counting(Console(stderr=True), f"loading {model}") as progress:
        from autotune import profiling  # noqa: PLC0415  # takes seconds, in which something is to be seen

        return profiling.measure(
            model, pool_bytes=pool_bytes, device=device, dtype=dtype, threads=threads, quick=quick, progress=progress
        )


def _estimate(
    model: Path, device: str | None, pool_bytes: int | None, url: str | None, duration_s: float, every_s: float
) -> Profile:
    from autotune import profiling  # noqa: PLC0415

    base = profiling.analytic(model, profiling.FALLBACK_DEVICE if device is None else device, pool_bytes)
    return base if url is None else profiling.from_metrics(base, url, _pages(url, duration_s, every_s))


def _write(found: Profile, out: Path, quality: Path | None, model: Path) -> Profile:
    from autotune import profiling  # noqa: PLC0415
    from envs.profile import write_profile  # noqa: PLC0415

    if quality is not None:
        found = found.model_copy(update={"quality": profiling.read_quality(quality, model)})
    write_profile(found, out)
    return found


def _pages(url: str, duration_s: float, every_s: float) -> Iterator[str]:
    import httpx  # noqa: PLC0415

    readings = round(duration_s / every_s) + 1
    if readings < _FEW_READINGS:
        raise CliError(
            f"--duration {duration_s:g} over --every {every_s:g}: that is too few readings to fit anything", 2
        )
    page = url if url.rstrip("/").endswith("/metrics") else f"{url.rstrip('/')}/metrics"
    for number in range(readings):
        if number:
            time.sleep(every_s)
        try:
            response = httpx.get(page, timeout=10.0)
            response.raise_for_status()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise CliError(f"{page}: {error}") from error
        yield response.text


def _show(found: Profile, out: Path) -> None:
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    console = Console(highlight=False)
    table = Table("term", "each", "unit", "", box=None, title=found.describe(), title_justify="left")
    for name, term in found.latency.terms.items():
        if term.seconds:
            table.add_row(name, _time(term.seconds), term.unit, "estimated" if term.estimated else "")
    console.print(table)
    for what, fit in (("steps", found.latency.steps), ("recoding", found.latency.recodes)):
        if fit is not None:
            console.print(
                f"{what}: error median {fit.median:.1%}, p90 {fit.p90:.1%} over {fit.samples} held-out samples"
            )
    for note in found.notes:
        console.print(note, markup=False, soft_wrap=True)
    console.print(f"written: {out}", markup=False, soft_wrap=True)


def _time(seconds: float) -> str:
    for factor, unit in ((1e3, "ms"), (1e6, "us"), (1e9, "ns"), (1e12, "ps")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e15:.3g} fs"
