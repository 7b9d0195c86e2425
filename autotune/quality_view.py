"""A quality table for people: on a terminal, with progress while it is measured, and as CSV."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich import box
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from engine.quality.gate import QualityBudget
from engine.quality.probes import RETRIEVES
from engine.quality.table import Probes, QualityTable, Row, Scores


@contextmanager
def progress_bars(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Yields a function to be told (stage, done, total): a bar per stage, or a line per stage without a terminal."""
    columns = (TextColumn("{task.description:<18}"), BarColumn(), TextColumn("{task.percentage:3.0f} %"))
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bars:
        stages: dict[str, TaskID] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in stages:
                stages[stage] = bars.add_task(stage, total=total)
                if not console.is_terminal:
                    console.print(f"{stage}: {total} tokens", markup=False)
            bars.update(stages[stage], completed=done)

        yield show


def quality_table_view(table: QualityTable, budget: QualityBudget) -> list[RenderableType]:
    """The table, errors by position, and how it was measured; in the order to print."""
    conditions = table.conditions
    what = "text" if conditions["text"] else "generated text"
    how = (
        f"Judged on the {conditions['tokens'] - conditions['prompt_tokens']} tokens after prompts of "
        f"{conditions['prompt_tokens']}, fed in chunks of {conditions['chunk_tokens']}, all KV older than "
        f"{conditions['recent_tokens']} tokens recoded. Perplexity (ppl), KL and top-1 agreement are of {what}, "
        f"keys are the retrieval probes answered. "
        f"{table.model.dtype} weights, {table.machine['device']}."
    )
    notes = [how, "An error that accumulates rises from left to right."]
    native = table.settings["native"]
    if native.probes is not None:
        notes += about_probes(native.probes)
    return [_figures(table, budget), "", _positions(table), "", *notes]


def about_probes(native: Probes) -> list[str]:
    """Whether the column of retrieval means anything, as far as the number of probes allows to judge."""
    if native.accuracy >= RETRIEVES:
        return []
    answered = f"The native cache answers {round(native.accuracy * native.n)} of {native.n} passkeys"
    if _upper_bound(native.accuracy, native.n) >= RETRIEVES:
        return [f"{answered}: too few probes to judge whether this model retrieves (more without --quick)."]
    return [f"{answered}: this model does not retrieve well enough for that column to mean anything."]


def _upper_bound(share: float, number: int) -> float:
    """The most that a share of so many may be in truth, at 95 % (Wilson's interval)."""
    z2 = 1.96**2
    spread = math.sqrt(z2 * (share * (1 - share) / number + z2 / (4 * number**2)))
    return (share + z2 / (2 * number) + spread) / (1 + z2 / number)


def _table(title: str) -> Table:
    view = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    view.add_column("setting", no_wrap=True)
    return view


def _figures(table: QualityTable, budget: QualityBudget) -> Table:
    view = _table(f"{table.model.name}: cost of KV formats and eviction, budget {budget.perplexity_pct:g} %")
    for name in ("bits", "tok/s", "ppl", "increase %", "KL", "top1 %", "keys %"):
        view.add_column(name, justify="right", no_wrap=True)
    view.add_column("", no_wrap=True)
    for name, row in table.settings.items():
        scores = row.judged
        view.add_row(
            name,
            f"{row.bits_per_element:.2f}",
            "-" if row.decode_tokens_per_s is None else f"{row.decode_tokens_per_s:.0f}",
            f"{scores.perplexity:.2f}",
            f"{scores.increase_pct:+.2f}±{scores.increase_error_pct:.2f}",
            f"{scores.kl:.1e}".replace("e-0", "e-"),
            f"{100 * scores.top1:.1f}",
            "-" if row.probes is None else f"{100 * row.probes.accuracy:.0f}",
            "over" if budget.verdict(row) else "ok",
        )
    return view


def _positions(table: QualityTable) -> Table:
    view = _table("10,000 x KL from native, by position")
    first = table.settings["native"]
    parts = (first.text or first.generated).by_position
    step = table.conditions["tokens"] // len(parts)
    for part in range(len(parts)):
        view.add_column(str(part * step), justify="right", no_wrap=True)
    for name, row in table.settings.items():
        if name != "native":
            view.add_row(name, *[_ten_thousandths(part) for part in (row.text or row.generated).by_position])
    return view


def _ten_thousandths(scores: Scores | None) -> str:
    return "-" if scores is None else f"{1e4 * scores.kl:.1f}"


def write_csv(table: QualityTable, budget: QualityBudget, path: Path) -> None:
    """One line per setting; an empty cell is a figure that was not measured. May raise OSError."""
    rows = [_flat(name, row, budget) for name, row in table.settings.items()]
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _flat(name: str, row: Row, budget: QualityBudget) -> dict[str, object]:
    """Columns of the CSV file in order."""
    flat: dict[str, object] = {"setting": name}
    flat |= {knob: row.values.get(knob, "") for knob in ("kv_format", "eviction", "keep_tokens")}
    flat |= {"bits_per_element": row.bits_per_element, "decode_tokens_per_s": row.decode_tokens_per_s}
    answers = None if row.probes is None else row.probes.answers
    text = None if row.text is None else row.text.after_prompt
    for source, scores in (("generated", row.generated.after_prompt), ("text", text), ("probes", answers)):
        for figure in Scores.model_fields:
            flat[f"{source}_{figure}"] = None if scores is None else getattr(scores, figure)
    flat["passkeys"] = None if row.probes is None else row.probes.n
    flat["passkey_accuracy"] = None if row.probes is None else row.probes.accuracy
    for index, part in enumerate((row.text or row.generated).by_position):
        flat[f"kl_part_{index + 1}"] = None if part is None else part.kl
    flat["verdict"] = budget.verdict(row) or "ok"
    return flat
