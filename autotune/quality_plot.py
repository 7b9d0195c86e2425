"""A quality table as a picture. matplotlib is an optional extra (``plots``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.quality.gate import QualityBudget
from engine.quality.table import QualityTable, Row


def draw(table: QualityTable, budget: QualityBudget, paths: Sequence[Path]) -> None:
    """Perplexity that each setting adds, with errors and the budget, and divergence along the sequence. May raise
    OSError. The kind of file follows from each path's suffix.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - slow, and optional

    rows = {name: row for name, row in table.settings.items() if name != "native"}
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    _cost(left, rows, budget)
    _by_position(right, rows, table.conditions["tokens"])
    source = "text" if table.conditions["text"] else "generated text"
    figure.suptitle(f"{table.model.name} ({table.model.dtype}), on {source}, against the native cache")
    for path in paths:
        figure.savefig(path, dpi=150)


def _cost(axes: Any, rows: dict[str, Row], budget: QualityBudget) -> None:
    names = [f"{name}\n{row.bits_per_element:.2f} bits" for name, row in rows.items()]
    heights = [row.judged.increase_pct for row in rows.values()]
    errors = [row.judged.increase_error_pct for row in rows.values()]
    colours = ["tab:red" if budget.verdict(row) else "tab:blue" for row in rows.values()]
    axes.barh(range(len(rows)), heights, xerr=errors, color=colours, capsize=3)
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.axvline(budget.perplexity_pct, color="black", linestyle=":", label=f"budget {budget.perplexity_pct:g} %")
    axes.set_xlabel("increase of perplexity, % (± standard error)")
    axes.legend()


def _by_position(axes: Any, rows: dict[str, Row], tokens: int) -> None:
    for name, row in rows.items():
        parts = (row.text or row.generated).by_position
        step = tokens / len(parts)
        # Nothing differs before the first block is recoded or evicted, and a logarithm has no place for that.
        points = [(step * (i + 0.5), part.kl) for i, part in enumerate(parts) if part is not None and part.kl > 0]
        axes.plot(*zip(*points, strict=True), marker="o", label=name) if points else None
    axes.set_yscale("log")
    axes.set_xlabel("position, tokens")
    axes.set_ylabel("KL divergence from native, nats")
    axes.legend(fontsize="small")
