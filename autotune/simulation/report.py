"""The result of a simulation for people: a table in the terminal and one HTML file with plots. No dependencies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import zip_longest

from autotune.simulation.charts import Line, line_chart, stacked_chart
from autotune.simulation.html_page import page, table
from autotune.simulation.units import seconds
from envs.signals import FORMAT_NAMES, Targets
from policies.play import Played

_MOST_MOVES = 200


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

    @property
    def targets_text(self) -> str:
        """In words."""
        targets = self.targets
        gaps = f"{targets.quantile:.0%} of a request's gaps {seconds(targets.tbt_s)}"
        return f"first token {seconds(targets.ttft_s)}, {gaps}"


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


def budget_note(results: Sequence[Played]) -> str | None:
    """What the mark of :func:`shown_name` means, None where nobody has it."""
    if all(played.budgeted for played in results):
        return None
    return "no budget: played as published, the guard does not hold it to the quality budget that the others keep"


def shown_name(played: Played) -> str:
    """With a mark where the guard did not hold it to the quality budget, as it did the others."""
    return played.name if played.budgeted else f"{played.name} (no budget)"


def notes_on(results: Sequence[Played]) -> list[str]:
    """What a reader of the table would wonder about: columns that are the same, and hits that nobody counted."""
    notes = []
    groups: dict[tuple[str, ...], list[Played]] = {}
    for played in results:
        groups.setdefault(tuple(_cells(played)[1:-1]), []).append(played)  # all but the name and the changes
    for same in groups.values():
        if len(same) > 1:
            names = " and ".join(", ".join(shown_name(one) for one in same).rsplit(", ", 1))
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
        shown_name(played),
        f"{played.completed}",
        f"{played.goodput_rps:.2f}",
        "-" if played.attainment is None else f"{played.attainment:.1%}",
        *(seconds(played.ttft.quantile_s(q)) for q in (0.5, 0.9, 0.99)),
        *(seconds(played.tbt.quantile_s(q)) for q in (0.5, 0.99)),
        f"{played.quality_per_token:.2%}",
        f"{played.rejected + played.failed}",
        f"{played.preemptions}",
        "-" if hits is None else f"{hits:.1%}",
        f"{len(played.moves)}",
    ]


def html_report(results: Sequence[Played], setting: Setting) -> str:
    """The report as one HTML document without scripts or links."""
    header, cells = rows(results)
    body = [f"<h1>Simulated: {escape(setting.workload)}</h1>"]
    if setting.is_estimated:
        body.append('<p class="warn"><b>Estimated.</b> Some step times of this profile were never measured.</p>')
    overload = overload_note(results)
    if overload is not None:
        body.append(f'<p class="warn">{escape(overload[0].upper() + overload[1:])}.</p>')
    body += [f"<p>{escape(note)}.</p>" for note in notes_on(results)]
    body.append(
        f"<p>{escape(setting.profile)}. Targets: {escape(setting.targets_text)}. "
        f"A decision every {setting.interval_s:g} s, seed {setting.seed}.</p>"
    )
    body += [f"<p>{escape(note)}</p>" for note in setting.notes]
    body.append(table(header, cells))
    free = budget_note(results)
    if free is not None:
        body.append(f"<p>{escape(free[0].upper() + free[1:])}.</p>")
    body += _comparison(results, setting)
    for played in results:
        body += _section(played, setting)
    return page(setting.workload, body)


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
            lines.append(Line(shown_name(played), padded))
        parts.append(f"<h3>{title}</h3>{line_chart(times, lines, 's', log=True, level=level)}")
    return parts


def _section(played: Played, setting: Setting) -> list[str]:
    times = [row.at_s for row in played.rows]
    marks = [(move.at_s, f"{move.change} ({move.scenario})") for move in played.moves]
    load = [
        Line("running", [float(row.running) for row in played.rows]),
        Line("waiting", [float(row.waiting) for row in played.rows]),
    ]
    layers = [Line(name, [float(row.resident.get(name, 0)) for row in played.rows]) for name in FORMAT_NAMES]
    over = [
        Line("TTFT tail / target", [_over(row.ttft_tail_s, setting.targets.ttft_s) for row in played.rows]),
        Line("TBT tail / target", [_over(row.tbt_tail_s, setting.targets.tbt_s) for row in played.rows]),
    ]
    parts = [
        f"<h2>{escape(shown_name(played))}</h2>",
        f"<h3>Load: requests</h3>{line_chart(times, load, '', marks=marks)}",
        f"<h3>KV by format</h3>{stacked_chart(times, layers, 'B', top=played.pool_bytes, marks=marks)}",
        f"<h3>Latency against targets</h3>{line_chart(times, over, '', log=True, marks=marks, level=1.0)}",
    ]
    if played.moves:
        shown = [(f"{move.at_s:.0f} s", move.change, move.scenario) for move in played.moves[:_MOST_MOVES]]
        more = f"<p>and {len(played.moves) - _MOST_MOVES} more</p>" if len(played.moves) > _MOST_MOVES else ""
        parts.append(f"<h3>Decisions</h3>{table(('at', 'change', 'scenario'), shown)}{more}")
    return parts


def _over(value: float | None, target: float) -> float | None:
    return None if value is None else value / target
