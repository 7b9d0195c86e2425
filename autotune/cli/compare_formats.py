"""``autotune compare-formats``: what every storage format and eviction costs one model."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli._shared import CliError, given_path, new_path

if TYPE_CHECKING:
    from rich.console import Console

    from engine.quality.measure import Effort, Text
    from engine.quality.table import QualityTable

_TABLE, _CSV, _PLOTS = "quality.json", "quality.csv", ("quality.png", "quality.svg")


def register(app: typer.Typer) -> None:
    app.command("compare-formats", short_help="What each KV format costs a model.")(compare_formats)


def compare_formats(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Model folder.", parser=given_path)],
    *,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="Text for perplexity: a file, or a folder of .txt or .txt.gz.", parser=given_path
        ),
    ] = None,
    held_out: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Of a folder, only files whose names begin so.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="DIR", help=f"Write {_TABLE} here (made if missing).", parser=new_path),
    ] = None,
    csv: Annotated[bool, typer.Option("--csv", help=f"Write {_CSV} too.")] = False,
    plot: Annotated[
        bool, typer.Option("--plot", help=f"Draw {' and '.join(_PLOTS)} too (needs matplotlib: the extra plots).")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and shorter samples, for a first look.")] = False,
    quality_budget: Annotated[
        float,
        typer.Option("--quality-budget", metavar="PCT", min=0, help="Perplexity that a setting may cost, percent."),
    ] = 0.5,
    min_agreement: Annotated[
        float, typer.Option(metavar="SHARE", min=0, max=1, help="Least top-1 agreement with the native cache.")
    ] = 0.0,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    seed: Annotated[int, typer.Option(min=0, help="Of generated text and probes.")] = 0,
) -> None:
    """Measure every KV format and eviction on MODEL against its native cache: bits, speed, KL divergence, agreement,
    perplexity, retrieval, and error by position.

    Scored on text that the model generates, on retrieval probes, and on yours if given (use one that it was not trained
    on). Takes a few minutes for a small model on two cores. quality.json is this model's quality table: autotune engine
    --quality-table refuses formats over the budget by it.
    """
    # What takes minutes should not end in a path that cannot be written; and whoever wants a plot may still stop it.
    folder = _output_folder(out, wanted=csv or plot)
    if plot and importlib.util.find_spec("matplotlib") is None:
        typer.echo("the plot needs matplotlib (pip install 'kv-autotune[plots]'): measuring without it", err=True)
        plot = False
    try:
        table = _measure(model, text, held_out, quick=quick, device=device, dtype=dtype, seed=seed)
    except ModuleNotFoundError as error:
        hint = "measuring needs the engine: pip install 'kv-autotune[engine]'"
        raise CliError(f"{error.name} is not installed; {hint}") from error
    _show(table, folder, budget_pct=quality_budget, min_agreement=min_agreement, csv=csv, plot=plot)


def _measure(
    model: Path, text: Path | None, held_out: str | None, *, quick: bool, device: str, dtype: str, seed: int
) -> QualityTable:
    from rich.console import Console  # noqa: PLC0415  # slow imports, and not for --help

    from engine.errors import EngineError  # noqa: PLC0415
    from engine.models.folder import check_folder  # noqa: PLC0415
    from engine.quality.texts import read_text  # noqa: PLC0415

    try:
        check_folder(model)
        words = None if text is None else read_text(text, held_out)
        from engine.quality.measure import Effort  # noqa: PLC0415  # torch, which no mistake above need wait for

        effort = Effort.quick() if quick else Effort()
        return _run(model, words, effort, Console(stderr=True), device=device, dtype=dtype, seed=seed)
    except EngineError as error:
        raise CliError(str(error)) from error


def _run(
    model: Path,
    words: tuple[str, str] | None,
    effort: Effort,
    console: Console,
    *,
    device: str,
    dtype: str,
    seed: int,
) -> QualityTable:
    from tokenizers import Tokenizer  # noqa: PLC0415

    from autotune.quality_view import progress_bars  # noqa: PLC0415
    from engine.loader import load_model  # noqa: PLC0415
    from engine.quality.measure import measure  # noqa: PLC0415
    from engine.tokenizer import ModelTokenizer  # noqa: PLC0415

    tokenizer, bos = None, None
    if (model / "tokenizer.json").is_file():
        bos = ModelTokenizer(model).bos_token_id
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    given = _tokens(words, tokenizer, model)
    loaded = load_model(model, device, dtype)
    with progress_bars(console) as show:
        return measure(loaded, effort=effort, text=given, tokenizer=tokenizer, bos=bos, seed=seed, progress=show)


def _tokens(words: tuple[str, str] | None, tokenizer: object, model: Path) -> Text | None:
    from tokenizers import Tokenizer  # noqa: PLC0415

    from engine.quality.measure import Text  # noqa: PLC0415

    if words is None:
        return None
    if not isinstance(tokenizer, Tokenizer):
        raise CliError(f"{model} holds no tokenizer.json, so --text cannot be read; leave it out")
    name, content = words
    return Text(name, tokenizer.encode(content, add_special_tokens=False).ids)


def _show(
    table: QualityTable, folder: Path | None, *, budget_pct: float, min_agreement: float, csv: bool, plot: bool
) -> None:
    from rich.console import Console  # noqa: PLC0415

    from autotune.quality_view import quality_table_view, write_csv  # noqa: PLC0415
    from engine.quality.gate import QualityBudget  # noqa: PLC0415
    from engine.quality.table import write_table  # noqa: PLC0415

    budget = QualityBudget(budget_pct, min_agreement)
    console = Console(highlight=False)
    for part in quality_table_view(table, budget):
        console.print(part, markup=False) if isinstance(part, str) else console.print(part)
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_table(table, folder / _TABLE)
        written = [_TABLE]
        if csv:
            write_csv(table, budget, folder / _CSV)
            written.append(_CSV)
        if plot:
            from autotune.quality_plot import draw  # noqa: PLC0415

            draw(table, budget, [folder / name for name in _PLOTS])
            written += _PLOTS
    except OSError as error:
        raise CliError(f"{error.filename}: cannot be written: {error.strerror}") from None
    console.print(f"Written to {folder}: {', '.join(written)}", markup=False, soft_wrap=True)


def _output_folder(out: Path | None, *, wanted: bool) -> Path | None:
    """Where files go: the folder asked for, or the current one when only files were asked for."""
    if out is None:
        return Path() if wanted else None
    # It is made when there is something to put in it.
    there = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not there.is_dir():
        raise CliError(f"{out}: the folder cannot be made: {there} is a file")
    if not os.access(there, os.W_OK):
        raise CliError(f"{out}: the folder is not writable" if there == out else f"{out}: {there} is not writable")
    return out
