"""The result of a simulation for people: a table in the terminal and one HTML file with plots. No dependencies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import zip_longest
from pathlib import Path

from autotune.simulation.charts import Line, line_chart, stacked_chart
from envs.signals import FORMAT_NAMES, Targets
from policies.play import Played

_MB = 1e6
STYLE = (
    "body{font:15px/1.45 system-ui,sans-serif;max-width:900px;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;margin:1em 0}"
    "td,th{padding:.25em .7em;text-align:right;border-bottom:1px solid #ddd}"
    "td:first-child,th:first-child{text-align:left}.legend span{margin-right:1.2em;font-size:13px}"
    ".legend i{display:inline-block;width:.8em;height:.8em;margin-right:.35em}h3{margin:1.2em 0 .2em}"
    ".warn{background:#fff3d6;padding:.5em .8em}svg{max-width:100%;height:auto}"
)


@dataclass(frozen=True)
class Setting:
    """What was simulated: one line each. ``notes``: of the workload."""

    workload: str
    profile: str
    is_estimated: bool
    targets: Targets
    seed: int
    interval_s: float
    notes: Sequence[str] = ()


def rows(results: Sequence[Played]) -> tuple[list[str], list[list[str]]]:
    """Header and one row of texts per policy."""
    header = [
        "policy", "completed", "good/s", "inside", "TTFT p50", "p90", "p99", "TBT p50", "p99", "loss/token", "refused",
        "preempted", "hits", "changes",
    ]  # fmt: skip
    return header, [_cells(played) for played in results]


def overload_note(results: Sequence[Played]) -> str | None:
    """One line where more was offered than policies could serve, None where they could."""
    over = [
        f"{one.name} served {one.completed} of {one.offered} ({one.rejected} refused, {one.waiting} waiting at the end)"
        for one in results
        if one.is_overloaded
    ]
    return f"the offered load is beyond capacity: {'; '.join(over)}; lower it with --rate-scale" if over else None


def notes_on(results: Sequence[Played]) -> list[str]:
    """What a reader of the table would wonder about: columns that are the same, and hits that nobody counted."""
    notes = []
    groups: dict[tuple[str, ...], list[Played]] = {}
    for played in results:
        groups.setdefault(tuple(_cells(played)[1:-1]), []).append(played)  # all but the name and the changes
    for same in groups.values():
        if len(same) > 1:
            names = " and ".join(", ".join(one.name for one in same).rsplit(", ", 1))
            full = max(_fullest(one) for one in same)
            why = "whatever was changed" if any(one.moves for one in same) else "as nothing was changed"
            notes.append(
                f"{names} came out the same, {why} (the KV pool was at most {full:.0%} full); more load (--rate-scale) "
                "or a smaller pool (--kv-pool-bytes) may tell them apart"
            )
    if results and not any(one.queried_tokens for one in results):
        notes.append("hits: -, as no prompts of this workload begin alike, so none were looked up in the prefix cache")
    return notes


def _fullest(played: Played) -> float:
    most = max((sum(row.resident.values()) for row in played.rows), default=0)
    return most / played.pool_bytes if played.pool_bytes else 0.0


def _cells(played: Played) -> list[str]:
    hits = played.cached_tokens / played.queried_tokens if played.queried_tokens else None
    return [
        played.name,
        f"{played.completed}",
        f"{played.goodput_rps:.2f}",
        "-" if played.attainment is None else f"{played.attainment:.1%}",
        *(_ms(played.ttft.quantile_s(q)) for q in (0.5, 0.9, 0.99)),
        *(_ms(played.tbt.quantile_s(q)) for q in (0.5, 0.99)),
        f"{played.quality_per_token:.2%}",
        f"{played.rejected + played.failed}",
        f"{played.preemptions}",
        "-" if hits is None else f"{hits:.1%}",
        f"{len(played.moves)}",
    ]


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def html(results: Sequence[Played], setting: Setting) -> str:
    """The report as one HTML document without scripts or links."""
    header, table = rows(results)
    body = [f"<h1>Simulated: {escape(setting.workload)}</h1>"]
    if setting.is_estimated:
        body.append('<p class="warn"><b>Estimated.</b> Some step times of this profile were never measured.</p>')
    overload = overload_note(results)
    if overload is not None:
        body.append(f'<p class="warn">{escape(overload[0].upper() + overload[1:])}.</p>')
    body += [f"<p>{escape(note)}.</p>" for note in notes_on(results)]
    targets = setting.targets
    body.append(
        f"<p>{escape(setting.profile)}. Targets: first token {targets.ttft_s:g} s, {targets.quantile:.0%} of "
        f"a request's gaps {targets.tbt_s:g} s. A decision every {setting.interval_s:g} s, seed {setting.seed}.</p>"
    )
    body += [f"<p>{escape(note)}</p>" for note in setting.notes]
    body.append(f"<table><tr>{''.join(f'<th>{escape(cell)}</th>' for cell in header)}</tr>")
    body += [f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>" for cells in table]
    body.append("</table>")
    body += _comparison(results, setting)
    for played in results:
        body += _section(played, setting)
    title = escape(setting.workload)
    head = f'<meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(body)}</body></html>\n"


def _comparison(results: Sequence[Played], setting: Setting) -> list[str]:
    if len(results) < 2:
        return []
    times = [row.at_s for row in results[0].rows]
    parts = ["<h2>Side by side</h2>"]
    for title, name, level in (
        ("TTFT tail", "ttft_tail_s", setting.targets.ttft_s),
        ("TBT tail", "tbt_tail_s", setting.targets.tbt_s),
    ):
        lines = []
        for played in results:
            values = [getattr(row, name) for row in played.rows]
            padded = [value for value, _ in zip_longest(values, times)][: len(times)]
            lines.append(Line(played.name, padded))
        parts.append(f"<h3>{title}</h3>{line_chart(times, lines, 's', log=True, level=level)}")
    return parts


def _section(played: Played, setting: Setting) -> list[str]:
    times = [row.at_s for row in played.rows]
    marks = [(move.at_s, f"{move.change} ({move.scenario})") for move in played.moves]
    load = [
        Line("running", [float(row.running) for row in played.rows]),
        Line("waiting", [float(row.waiting) for row in played.rows]),
    ]
    layers = [Line(name, [row.resident.get(name, 0) / _MB for row in played.rows]) for name in FORMAT_NAMES]
    over = [
        Line("TTFT tail / target", [_over(row.ttft_tail_s, setting.targets.ttft_s) for row in played.rows]),
        Line("TBT tail / target", [_over(row.tbt_tail_s, setting.targets.tbt_s) for row in played.rows]),
    ]
    parts = [
        f"<h2>{escape(played.name)}</h2>",
        f"<h3>Load: requests</h3>{line_chart(times, load, '', marks=marks)}",
        f"<h3>KV by format</h3>{stacked_chart(times, layers, 'MB', top=played.pool_bytes / _MB, marks=marks)}",
        f"<h3>Latency against targets</h3>{line_chart(times, over, '', log=True, marks=marks, level=1.0)}",
    ]
    if played.moves:
        rows_of = "".join(
            f"<tr><td>{move.at_s:.0f} s</td><td>{escape(move.change)}</td><td>{escape(move.scenario)}</td></tr>"
            for move in played.moves[:200]
        )
        more = f"<p>and {len(played.moves) - 200} more</p>" if len(played.moves) > 200 else ""
        parts.append(
            f"<h3>Decisions</h3><table><tr><th>at</th><th>change</th><th>scenario</th></tr>{rows_of}</table>{more}"
        )
    return parts


def _over(value: float | None, target: float) -> float | None:
    return None if value is None else value / target


def write_html(results: Sequence[Played], setting: Setting, path: Path) -> None:
    """Raises OSError."""
    path.write_text(html(results, setting), encoding="utf-8")
