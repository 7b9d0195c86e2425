"""An evaluation for people: tables for the terminal and one HTML file with plots. No dependencies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from autotune.simulation.bars import Bar, bar_chart
from autotune.simulation.charts import Line, line_chart
from autotune.simulation.html_page import page, table
from autotune.simulation.units import number, seconds

_OBJECTIVES = (
    ("interactive", "requests inside all targets, of those offered"),
    ("batch", "tokens while requests arrive, over native's"),
)
Rows = tuple[list[str], list[list[str]]]


def overall_rows(document: Mapping[str, Any], objective: str) -> Rows:
    """Header and a row of texts per contender."""
    name_of = _names(document)
    header = ["contender", "IQM", "x native", "P(> native)", "P(> best static)", "regret", "budget", "loses to native"]
    return header, [
        [
            name_of(row["contender"]),
            _interval(row["iqm"]),
            _interval(row["ratio_to_native"]),
            _number(row["better_than_native"]["value"]),
            _number(row["better_than_best_static"]["value"]),
            "-" if row["regret_pct"] is None else f"{_interval(row['regret_pct'])} %",
            "inside" if row["inside_budget"] else "OVER",
            ", ".join(row["loses_to_native"]) or "-",
        ]
        for row in document["overall"][objective]
    ]


def workload_rows(document: Mapping[str, Any]) -> Rows:
    """Header and a row of texts per workload and contender."""
    name_of = _names(document)
    header = [
        "workload", "contender", "good/s", "inside", "TTFT p95", "TBT p95", "loss/token", "tokens/s", "changes/h",
        "preempted", "refused",
    ]  # fmt: skip
    return header, [
        [
            row["workload"] + (" (pressured)" if row["pressured"] else ""),
            name_of(row["contender"]) + ("" if row["contender"] == row["setting"] else f" ({row['setting']})"),
            _number(row["goodput_rps"]),
            f"{row['attainment']:.1%}",
            seconds(row["ttft_p95_s"]),
            seconds(row["tbt_p95_s"]),
            f"{row['quality_loss']:.2%}" + ("" if row["inside_budget"] else " OVER"),
            _number(row["tokens_per_s"]),
            _number(row["changes_per_hour"]),
            _number(row["preemptions"]),
            _number(row["refused"]),
        ]
        for row in document["workloads"]
    ]


def cost_rows(document: Mapping[str, Any]) -> Rows:
    """Header and a row of texts per workload and contender."""
    name_of = _names(document)
    header = ["workload", "contender", "rate it takes", "cost per million tokens"]
    return header, [
        [
            row["workload"],
            name_of(row["contender"]),
            f"{row['rate']:.2f} x" + (" (end of the ladder)" if row["bounded"] else ""),
            "never attains it" if row["per_million"] is None else f"{row['per_million']:.4g}",
        ]
        for row in document["costs"]
    ]


def html(document: Mapping[str, Any]) -> str:
    """The report as one HTML document without scripts or links."""
    body = [f"<h1>Policies compared</h1><p><b>{escape(document['verdict'])}</b></p>"]
    if document["estimated"]:
        body.append('<p class="warn"><b>Estimated.</b> Some step times of this profile were never measured.</p>')
    body += [f"<p>{escape(note)}</p>" for note in document["notes"]]
    name_of = _names(document)
    for objective, what in _OBJECTIVES:
        body.append(f"<h2>Over all workloads: {objective}</h2><p>{what}; interquartile mean, 95 % interval</p>")
        rows = document["overall"][objective]
        bars = [_bar(name_of(row["contender"]), row["iqm"]) for row in rows]
        native = next((bar.value for bar in bars if bar.label == "none"), None)
        body += [bar_chart(bars, mark=native), table(*overall_rows(document, objective))]
    if document["ablation"]:
        body.append(f"<h2>Without one knob: {escape(str(document['best_policy']))}</h2>")
        body.append("<p>Goodput lost, share of offered</p>")
        tried = {knob: lost for knob, lost in document["ablation"].items() if lost is not None}
        body.append(bar_chart([_bar(knob, lost) for knob, lost in tried.items()]))
        nothing = [knob for knob, lost in tried.items() if not lost["gains"]]
        body.append(f"<p>Gains nothing that can be told: {escape(', '.join(nothing) or 'none')}</p>")
    if document["ladders"]:
        body.append(f"<h2>Cost</h2><p>{escape(document['cost_method'])}</p>")
        for workload, ladder in document["ladders"].items():
            lines = [Line(name_of(name), values) for name, values in ladder["attainment"].items()]
            chart = line_chart(ladder["rates"], lines, "", level=document["cost_level"], along="x")
            body.append(f"<h3>{escape(workload)}: attainment over its rate, times its own</h3>{chart}")
        body.append(table(*cost_rows(document)))
    body.append(f"<h2>By workload</h2>{table(*workload_rows(document))}")
    return page("Policies compared", body)


def write_html(document: Mapping[str, Any], path: Path) -> None:
    """Raises OSError."""
    path.write_text(html(document), encoding="utf-8")


def _bar(name: str, value: Mapping[str, float | None]) -> Bar:
    return Bar(name, value["value"], value["low"], value["high"])


def _names(document: Mapping[str, Any]) -> Callable[[str], str]:
    """Of contenders, with a mark at those that the guard does not hold to the quality budget."""
    rows = [row for found in document["overall"].values() for row in found]
    free = {row["contender"] for row in rows if not row["held_to_budget"]}
    return lambda name: f"{name} (no budget)" if name in free else name


def _interval(value: Mapping[str, float | None]) -> str:
    parts: Sequence[float | None] = (value["value"], value["low"], value["high"])
    texts = [_number(part) for part in parts]
    return texts[0] if parts[1] is None else f"{texts[0]} [{texts[1]}, {texts[2]}]"


def _number(value: float | None) -> str:
    return "-" if value is None else number(value)
