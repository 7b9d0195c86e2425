"""Refuses storage formats that cost a model more than its user allows. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.errors import EngineError
from engine.quality.table import QualityTable, Row, read_table
from engine.tunables import TunableValue, TunableValues


@dataclass(frozen=True)
class QualityBudget:
    """What a setting may cost. ``perplexity_pct``: increase of perplexity; ``top1``: least agreement with native."""

    perplexity_pct: float = 0.5
    top1: float = 0.0

    def verdict(self, row: Row) -> str | None:
        """Why a setting is over the budget, with its figures, or None."""
        scores = row.judged
        over = []
        if scores.increase_pct > self.perplexity_pct:
            over.append(f"perplexity {scores.increase_pct:+.2f} % of {self.perplexity_pct:g} % allowed")
        if scores.top1 < self.top1:
            over.append(f"top-1 agreement {scores.top1:.1%} of at least {self.top1:.1%}")
        return ", ".join(over) or None


def quality_gate(table_path: Path, model: Path, budget: QualityBudget, values: TunableValues) -> QualityGate:
    """The gate of an engine that starts with these values.

    Raises EngineError for a table that cannot be read or belongs to another model, and for a value at start that the
    gate refuses.
    """
    table = read_table(table_path)
    table.check_model(model, table_path.name)
    gate = QualityGate(table, budget)
    for knob, value in values.items():
        why = gate(knob, value)
        if why is not None:
            raise EngineError(why)
    return gate


class QualityGate:
    """An :data:`engine.tunable_state.Veto`: says why a knob may not take a value, with the figures, or None.

    Only ``kv_format`` has a price here. A format that the table lacks is refused too.
    """

    def __init__(self, table: QualityTable, budget: QualityBudget) -> None:
        self._table = table
        self._budget = budget

    def __call__(self, knob: str, value: TunableValue) -> str | None:
        if knob != "kv_format" or value == "native":
            return None
        row = self._table.row_of_format(str(value))
        if row is None:
            return f"kv_format {value}: the quality table of {self._table.model.name} has no figures for it"
        over = self._budget.verdict(row)
        if over is None:
            return None
        scores = row.judged
        figures = f"KL {scores.kl:.2g}, top-1 agreement {scores.top1:.1%}"
        if row.probes is not None:
            figures += f", {row.probes.accuracy:.0%} of {row.probes.n} passkeys"
        return f"kv_format {value} is over the quality budget of {self._table.model.name}: {over} ({figures})"
