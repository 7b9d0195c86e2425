"""What the demonstration prints: the machine, the load, the comparison, and one line of JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from autotune.demo.foretell import Foretold
from autotune.demo.sides import NATIVE, Side
from autotune.demo.sides_view import order_agreement, rounded, side_figures
from autotune.demo.sizing import Rates, SizedLoad
from autotune.demo.watch import Seen
from autotune.replay.summary import Percentiles, Summary
from autotune.replay.view import seconds
from envs.workload.trace import Trace


@dataclass(frozen=True)
class Arm:
    """One replay, and what it was run under. ``journal``: its daemon's, None without one."""

    side: Side
    summary: Summary
    seen: Seen
    journal: Path | None = None

    @property
    def inside(self) -> float:
        """Share of the requests that were sent that stayed inside all targets."""
        return self.summary.within_targets / self.summary.offered if self.summary.offered else 0.0


def machine_lines(rates: Rates) -> list[str]:
    return [
        (
            f"prefill {rates.prefill_tps:,.0f} tokens/s; a decode step takes {seconds(rates.step_s)} and "
            f"{rates.per_sequence_s * 1e3:.2f} ms per running request: {rates.decode_tps(1):,.0f} tokens/s alone, "
            f"{rates.decode_tps(16):,.0f} with 16 running"
        ),
        (
            f"idle engine: first token of a {rates.probe_prompt_tokens}-token prompt after {seconds(rates.ttft_s)}, "
            f"then one every {seconds(rates.gap_s)}"
        ),
    ]


def load_lines(load: SizedLoad, trace: Trace) -> list[str]:
    return [
        (
            f"{trace.name}: {len(trace.requests)} requests in {trace.duration_s:.0f} s, lengths divided by "
            f"{load.length_scale:.2f}: on average {load.mean_prompt_tokens:.0f} prompt and "
            f"{load.mean_output_tokens:.0f} output tokens"
        ),
        (
            f"KV pool {load.pool_bytes / 2**20:.1f} MiB = {load.pool_tokens:,} tokens in native: about "
            f"{load.native_running} requests at once, {load.small_running} if old blocks are in 4 bits"
        ),
        (
            f"this machine serves {load.native_limit_rps:.2f} requests/s with {load.native_running} at once and "
            f"{load.small_limit_rps:.2f} with {load.small_running}, if none is computed twice; the peaks offer "
            f"{load.peak_rps:.2f}: a native cache is full then, and requests that it has to preempt are computed "
            "again, which takes the time that the queue would need"
        ),
        (
            f"targets for goodput: TTFT <= {seconds(load.ttft_target_s)} ({load.ttft_why}), p95 TBT of a request <= "
            f"{seconds(load.tbt_target_s)} ({load.tbt_why})"
        ),
    ]


def comparison(arms: Sequence[Arm]) -> Table:
    """One column per arm, in the order in which they ran."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(no_wrap=True)
    for arm in arms:
        table.add_column(arm.side.label, justify="right")
    for name, cells in _rows(arms):
        table.add_row(name, *cells)
    return table


def result(
    arms: Sequence[Arm],
    load: SizedLoad,
    rates: Rates,
    sides: Sequence[Side],
    foretold: Mapping[str, Foretold] | None = None,
) -> dict[str, Any]:
    """The last line. Counts are sums over the replays of the first side, latencies and goodput means over them.

    The second side's figures start with ``static_native_``, or with ``against_`` when it is anything else; ``sides``
    has every side's, round by round.
    """
    first, second = sides[0], sides[1]
    other = "static_native" if second.name == NATIVE else "against"
    tuned = [arm for arm in arms if arm.side == first]
    static = [arm for arm in arms if arm.side == second]

    def used(knob: str) -> list[Any]:
        lists = [arm.seen.used(knob) for arm in tuned]
        return list(dict.fromkeys(value for values in lists for value in values))

    return {
        "requests_sent": sum(arm.summary.offered for arm in tuned),
        "requests_completed": sum(arm.summary.completed for arm in tuned),
        "requests_failed": sum(arm.summary.failed for arm in arms),
        "decisions_applied": sum(len(arm.seen.applied) for arm in tuned),
        "formats_used": used("kv_format"),
        "block_sizes_used": used("block_size"),
        "evictions_used": used("eviction"),
        "ttft_p95_s": _mean(arm.summary.ttft for arm in tuned),
        "tbt_p95_s": _mean(arm.summary.tbt for arm in tuned),
        "goodput_rps": rounded(fmean(arm.summary.goodput_rps for arm in tuned)),
        f"{other}_goodput_rps": rounded(fmean(arm.summary.goodput_rps for arm in static)),
        f"{other}_ttft_p95_s": _mean(arm.summary.ttft for arm in static),
        f"{other}_tbt_p95_s": _mean(arm.summary.tbt for arm in static),
        "pairs": [
            [rounded(a.summary.goodput_rps), rounded(b.summary.goodput_rps)] for a, b in zip(tuned, static, strict=True)
        ],
        **({} if second.name == NATIVE else {"against": second.name}),
        "sides": side_figures(arms, sides, foretold or {}),
        **({} if not foretold else {"order_agreement": order_agreement(arms, sides, foretold)}),
        "pool_bytes": load.pool_bytes,
        "peak_rps": rounded(load.peak_rps),
        "prefill_tps": rounded(rates.prefill_tps),
        "decode_tps_16": rounded(rates.decode_tps(16)),
    }


def print_lines(console: Console, lines: Sequence[str]) -> None:
    for line in lines:
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)


def _rows(arms: Sequence[Arm]) -> list[tuple[str, list[str]]]:
    summaries, seen = [arm.summary for arm in arms], [arm.seen for arm in arms]
    rows = [
        ("requests sent", [f"{s.offered}" for s in summaries]),
        ("completed", [f"{s.completed}" for s in summaries]),
        ("failed", [f"{s.failed}" for s in summaries]),
        ("inside the targets", [f"{s.within_targets} ({s.slo_attainment or 0:.0%})" for s in summaries]),
        ("goodput, requests/s", [f"{s.goodput_rps:.2f}" for s in summaries]),
        ("Apdex", ["-" if s.apdex is None else f"{s.apdex:.2f}" for s in summaries]),
        ("TTFT p50", [_shown(s.ttft, "p50_s") for s in summaries]),
        ("TTFT p95", [_shown(s.ttft, "p95_s") for s in summaries]),
        ("TBT p50", [_shown(s.tbt, "p50_s") for s in summaries]),
        ("TBT p95", [_shown(s.tbt, "p95_s") for s in summaries]),
        ("output tokens/s", [f"{s.output_tokens_per_s:.0f}" for s in summaries]),
        ("KV pool in use, peak", [f"{s.kv_usage_peak:.0%}" for s in seen]),
        ("KV pool over 90 %", [f"{s.kv_usage_high_s:.0f} s" for s in seen]),
        ("running, peak", [f"{s.running_peak}" for s in seen]),
        ("waiting, peak", [f"{s.waiting_peak}" for s in seen]),
        ("preemptions", [f"{s.preemptions}" for s in seen]),
        ("tokens recoded", [f"{s.recoded_tokens}" for s in seen]),
        ("tokens evicted", [f"{s.evicted_tokens}" for s in seen]),
        ("decisions applied", [f"{len(s.applied)}" for s in seen]),
        ("held back by the guard", [f"{s.held_back}" for s in seen]),
    ]
    for label, knob in (("formats", "kv_format"), ("block sizes", "block_size"), ("eviction", "eviction")):
        rows.append((label, [" ".join(str(value) for value in s.used(knob)) for s in seen]))
    return rows


def _shown(values: Percentiles | None, which: str) -> str:
    return seconds(None if values is None else getattr(values, which))


def _mean(values: Any) -> float | None:
    known = [value.p95_s for value in values if value is not None]
    return rounded(fmean(known)) if known else None
