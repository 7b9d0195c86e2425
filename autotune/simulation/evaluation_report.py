"""An evaluation for people: tables for the terminal and one HTML file with plots. No dependencies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from autotune.simulation.bars import Bar, bar_chart
from autotune.simulation.charts import Line, line_chart
from autotune.simulation.report import STYLE

_OBJECTIVES = (
    ("interactive", "requests inside all targets, of those offered"),
    ("batch", "tokens while requests arrive, over native's"),
)
Rows = tuple[list[str], list[list[str]]]


def overall_rows(document: Mapping[str, Any], objective: str) -> Rows:
    """Header and a row of texts per contender."""
    header = ["contender", "IQM", "x native", "P(> native)", "P(> best static)", "regret", "budget", "loses to native"]
    return header, [
        [
            row["contender"],
            _interval(row["iqm"]),
            _interval(row["ratio_to_native"]),
            _number(row["better_than_native"]["value"]),
            _number(row["better_than_best_static"]["value"]),
            "-" if row["regret_pct"] is None else f"{_interval(row['regret_pct'])} %",
            ("inside" if row["inside_budget"] else "OVER") + ("" if row["held_to_budget"] else ", not held to it"),
            ", ".join(row["loses_to_native"]) or "-",
        ]
        for row in document["overall"][objective]
    ]


def workload_rows(document: Mapping[str, Any]) -> Rows:
    """Header and a row of texts per workload and contender."""
    header = [
        "workload", "contender", "good/s", "inside", "TTFT p95", "TBT p95", "loss/token", "tokens/s", "changes/h",
        "preempted", "refused",
    ]  # fmt: skip
    return header, [
        [
            row["workload"] + (" (pressured)" if row["pressured"] else ""),
            row["contender"] if row["contender"] == row["setting"] else f"{row['contender']} ({row['setting']})",
            _number(row["goodput_rps"]),
            f"{row['attainment']:.1%}",
            _ms(row["ttft_p95_s"]),
            _ms(row["tbt_p95_s"]),
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
    header = ["workload", "contender", "rate it takes", "cost per million tokens"]
    return header, [
        [
            row["workload"],
            row["contender"],
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
    for objective, what in _OBJECTIVES:
        body.append(f"<h2>Over all workloads: {objective}</h2><p>{what}; interquartile mean, 95 % interval</p>")
        rows = document["overall"][objective]
        bars = [Bar(row["contender"], row["iqm"]["value"], row["iqm"]["low"], row["iqm"]["high"]) for row in rows]
        native = next((bar.value for bar in bars if bar.label == "none"), None)
        body += [bar_chart(bars, mark=native), _table(overall_rows(document, objective))]
    if document["ablation"]:
        body.append(f"<h2>Without one knob: {escape(str(document['best_policy']))}</h2>")
        body.append("<p>Goodput lost, share of offered</p>")
        tried = {knob: lost for knob, lost in document["ablation"].items() if lost is not None}
        body.append(bar_chart([Bar(knob, lost["value"], lost["low"], lost["high"]) for knob, lost in tried.items()]))
        nothing = [knob for knob, lost in tried.items() if not lost["gains"]]
        body.append(f"<p>Gains nothing that can be told: {escape(', '.join(nothing) or 'none')}</p>")
    if document["ladders"]:
        body.append(f"<h2>Cost</h2><p>{escape(document['cost_method'])}</p>")
        for workload, ladder in document["ladders"].items():
            lines = [Line(name, values) for name, values in ladder["attainment"].items()]
            chart = line_chart(ladder["rates"], lines, "", level=document["cost_level"])
            body.append(f"<h3>{escape(workload)}: attainment over its rate (times its own)</h3>{chart}")
        body.append(_table(cost_rows(document)))
    body.append(f"<h2>By workload</h2>{_table(workload_rows(document))}")
    head = f'<meta charset="utf-8"><title>Policies compared</title><style>{STYLE}</style>'
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(body)}</body></html>\n"


def write_html(document: Mapping[str, Any], path: Path) -> None:
    """Raises OSError."""
    path.write_text(html(document), encoding="utf-8")


def _table(rows: Rows) -> str:
    header, cells = rows
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in cells)
    return f"<table><tr>{head}</tr>{body}</table>"


def _interval(value: Mapping[str, float | None]) -> str:
    parts: Sequence[float | None] = (value["value"], value["low"], value["high"])
    texts = [_number(part) for part in parts]
    return texts[0] if parts[1] is None else f"{texts[0]} [{texts[1]}, {texts[2]}]"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
