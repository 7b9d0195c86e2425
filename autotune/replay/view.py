"""Show a replay while it runs: a progress bar and a live table on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from autotune.replay.records import Outcome, RequestRecord
from autotune.replay.runner import Progress
from autotune.replay.summary import Percentiles, Summary, Targets, percentiles, request_tbt_s

_LIVE_PERIOD_S = 0.5  # drawing costs processor time that the server may need
_LINE_PERIOD_S = 10.0
_WINDOW_S = 10.0


def seconds(value: float | None) -> str:
    """A duration for people; "-" when unknown."""
    if value is None:
        return "-"
    if value < 0.0995:
        return f"{value * 1e3:.1f} ms"
    return f"{value * 1e3:.0f} ms" if value < 0.9995 else f"{value:.2f} s"


async def watch(progress: Progress, targets: Targets, console: Console, title: str) -> None:
    """Draw until cancelled."""
    if not console.is_terminal:
        while True:
            await asyncio.sleep(_LINE_PERIOD_S)
            console.print(status_line(progress), highlight=False, markup=False, soft_wrap=True)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            live.update(_frame(progress, targets, title), refresh=True)
            await asyncio.sleep(_LIVE_PERIOD_S)


def status_line(progress: Progress) -> str:
    recent = _recent(progress)
    ttft = percentiles([record.ttft_s for record in recent if record.ttft_s is not None])
    return (
        f"{progress.now_s:6.1f} s: {len(progress.records)}/{progress.total} sent, {len(progress.in_flight)} in flight, "
        f"{_count(progress, Outcome.COMPLETED)} completed, {_count(progress, Outcome.FAILED)} failed, "
        f"TTFT p95 {_p95(ttft)} (last {_WINDOW_S:g} s)"
    )


def summary_table(summary: Summary, title: str) -> Table:
    """The whole summary as two columns."""
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    throughput = (
        f"{summary.request_rps:.2f} requests/s, {summary.output_tokens_per_s:.0f} output and "
        f"{summary.prompt_tokens_per_s:.0f} prompt tokens/s over {summary.duration_s:.1f} s"
    )
    rows = [
        ("offered", f"{summary.offered}"),
        ("completed", f"{summary.completed}"),
        ("failed", f"{summary.failed}{_kinds(summary)}"),
        *([("cancelled", f"{summary.cancelled} (stopped before their end)")] if summary.cancelled else []),
        ("TTFT p50/p95/p99", _triple(summary.ttft)),
        ("TBT p50/p95/p99", _triple(summary.tbt)),
        ("whole request p50/p95/p99", _triple(summary.e2e)),
        ("throughput", throughput),
        ("goodput", f"{summary.goodput_rps:.2f} requests/s{_targets(summary)}"),
        *([("Apdex", f"{_apdex(summary)} by the same targets")] if summary.targets.are_given else []),
        ("sent late by p50/p95/p99", _triple(summary.send_delay)),
    ]
    if summary.cached_prompt_tokens is not None:
        share = summary.cached_prompt_tokens / max(1, summary.prompt_tokens)
        rows.insert(-1, ("prompt tokens from the prefix cache", f"{summary.cached_prompt_tokens} ({share:.0%})"))
    for name, value in rows:
        table.add_row(name, value)
    return table


def _frame(progress: Progress, targets: Targets, title: str) -> RenderableType:
    recent = _recent(progress)
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("sent", "open", "done", "failed", "TTFT p50 / p95", "TBT p50 / p95", "in target", "tok/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    ttft = percentiles([record.ttft_s for record in recent if record.ttft_s is not None])
    tbt = percentiles([request_tbt_s(record, 0.5) for record in recent])
    tail = percentiles([request_tbt_s(record, targets.tbt_quantile) for record in recent])
    inside = sum(targets.met(record) for record in recent)
    tokens = sum(record.output_tokens for record in recent)
    table.add_row(
        f"{len(progress.records)}/{progress.total}",
        f"{len(progress.in_flight)}",
        f"{_count(progress, Outcome.COMPLETED)}",
        f"{_count(progress, Outcome.FAILED)}",
        f"{_p50(ttft)} / {_p95(ttft)}",
        f"{_p50(tbt)} / {_p95(tail)}",
        f"{inside}/{len(recent)}",
        f"{tokens / min(_WINDOW_S, max(progress.now_s, 1e-3)):.0f}",
        end_section=True,
    )
    table.caption = f"{progress.now_s:.0f} of {progress.duration_s:.0f} s; latencies of the last {_WINDOW_S:g} s"
    if not progress.sending:
        table.caption = f"all sent, waiting for {len(progress.in_flight)} answers"
    bar = ProgressBar(
        total=max(progress.duration_s, 1e-3), completed=min(progress.now_s, progress.duration_s), width=72
    )
    return Group(table, bar)


def _recent(progress: Progress) -> Sequence[RequestRecord]:
    start = progress.now_s - _WINDOW_S
    return [
        record
        for record in progress.records
        if record.outcome is Outcome.COMPLETED and (record.finished_s or 0.0) >= start
    ]


def _count(progress: Progress, outcome: Outcome) -> int:
    return sum(record.outcome is outcome for record in progress.records)


def _p50(values: Percentiles | None) -> str:
    return seconds(None if values is None else values.p50_s)


def _p95(values: Percentiles | None) -> str:
    return seconds(None if values is None else values.p95_s)


def _triple(values: Percentiles | None) -> str:
    return "-" if values is None else " / ".join(seconds(v) for v in (values.p50_s, values.p95_s, values.p99_s))


def _apdex(summary: Summary) -> str:
    return "-" if summary.apdex is None else f"{summary.apdex:.3f}"


def _kinds(summary: Summary) -> str:
    if not summary.failures:
        return ""
    kinds = ", ".join(f"{number} {kind}" for kind, number in summary.failures.items())
    return f" ({kinds}; the first: {summary.first_failure})"


def _targets(summary: Summary) -> str:
    targets = summary.targets
    parts = []
    if targets.ttft_s is not None:
        parts.append(f"TTFT <= {seconds(targets.ttft_s)}")
    if targets.tbt_s is not None:
        parts.append(f"p{targets.tbt_quantile * 100:g} TBT of the request <= {seconds(targets.tbt_s)}")
    if not parts:
        return " (no targets given: every completed request counts)"
    return f" with {' and '.join(parts)}: {summary.within_targets} of {summary.completed + summary.failed} requests"
