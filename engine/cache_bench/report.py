"""Runs rows one after the other and makes the document that the last line holds."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.cache_bench.context import Context, Skipped
from engine.cache_bench.registry import Row
from engine.clock import Clock


@dataclass
class Report:
    """``figures``: every key of every row, null where there is none; why is under ``skipped`` or ``failed``."""

    figures: dict[str, object] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    row_s: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {**self.figures, "skipped": self.skipped, "failed": self.failed, "row_s": self.row_s}


def run_rows(rows: Sequence[Row], context: Context, clock: Clock) -> Report:
    """Run every row. One that fails costs its own figures only."""
    report = Report()
    for row in rows:
        begin_ns = clock.now_ns()
        context.log(f"{row.name}: {', '.join(row.keys)}")
        try:
            values = row.run(context)
            if set(values) != set(row.keys):
                raise ValueError(f"row {row.name} promises {sorted(row.keys)} and yields {sorted(values)}")  # noqa: TRY301
            report.figures.update(values)
        except Skipped as reason:
            report.figures.update(dict.fromkeys(row.keys))
            report.skipped.update(dict.fromkeys(row.keys, str(reason)))
        except Exception as error:  # noqa: BLE001 - whatever it is, the other rows still count
            context.log(traceback.format_exc().rstrip())
            report.figures.update(dict.fromkeys(row.keys))
            report.failed.update(dict.fromkeys(row.keys, f"{type(error).__name__}: {error}"))
        report.row_s[row.name] = round((clock.now_ns() - begin_ns) / 1e9, 3)
        for key in row.keys:
            why = report.skipped.get(key) or report.failed.get(key)
            context.log(f"  {key} = {report.figures[key]}" + (f" ({why})" if why else ""))
    return report
