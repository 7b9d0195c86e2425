"""A sweep of rules over the load, for people: a table, and a page with plots. No dependencies."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from autotune.simulation.charts import Line, line_chart
from autotune.simulation.html_page import page
from autotune.simulation.html_page import table as html_table
from autotune.simulation.units import seconds
from policies.steady import Bench
from policies.sweep import Level


def table(levels: Sequence[Level]) -> tuple[list[str], list[list[str]]]:
    """Header and a row of texts per level."""
    header = [
        "", "load", "active rules", "settings", "KV used", "demand", "running", "waiting", "TTFT", "TBT", "changes",
    ]  # fmt: skip
    return header, [
        [
            level.direction,
            f"{level.load:g}",
            ", ".join(level.active) or "-",
            " ".join(f"{knob}={value}" for knob, value in level.settings.items()),
            _share(level.kv_usage),
            _share(level.kv_demand),
            str(level.running),
            str(level.waiting),
            seconds(level.ttft_tail_s),
            seconds(level.tbt_tail_s),
            str(level.changes),
        ]
        for level in levels
    ]


def html(name: str, bench: Bench, levels: Sequence[Level]) -> str:
    """One document without scripts or links."""
    up = [level for level in levels if level.direction == "up"]
    # The highest level was held once: both ways begin or end with it.
    down = [*reversed([level for level in levels if level.direction == "down"]), up[-1]]
    loads = [level.load for level in up]
    body = [f"<h1>Rules over the load: {escape(name)}</h1><p>{escape(bench.profile.describe())}</p>"]
    for title, field, unit, target in (
        ("KV pool in use", "kv_usage", "", None),
        ("Demand, if all were native", "kv_demand", "", 1.0),
        ("TTFT tail", "ttft_tail_s", "s", bench.targets.ttft_s),
        ("TBT tail", "tbt_tail_s", "s", bench.targets.tbt_s),
    ):
        lines = [
            Line(way, [getattr(level, field) for level in row], dashed=way == "down")
            for way, row in (("up", up), ("down", down))
        ]
        body.append(f"<h3>{title}</h3>{line_chart(loads, lines, unit, level=target, along='x')}")
    body.append(html_table(*table(levels)))
    return page("Rules over the load", body)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
