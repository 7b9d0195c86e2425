"""A trace as a picture: rate over time, gaps, lengths. matplotlib is an optional extra (``plots``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from envs.workload.statistics import Summary, arrival_times
from envs.workload.trace import Trace

_BINS = 200
_BLUE, _ORANGE = "#3465a4", "#ce5c00"


def plot_trace(trace: Trace, summary: Summary, path: Path) -> None:
    """Draw a trace into a file whose ending says the format. Raises ModuleNotFoundError without matplotlib, OSError."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - slow, and optional

    figure = Figure(figsize=(11, 7), layout="constrained")
    rate, gaps, prompts, outputs = figure.subplots(2, 2).flat
    _rate(rate, trace)
    _gaps(gaps, trace)
    for axes, name, values, marks, colour in (
        (prompts, "prompt", [request.prompt_tokens for request in trace.requests], summary.prompt, _BLUE),
        (outputs, "output", [request.output_tokens for request in trace.requests], summary.output, _ORANGE),
    ):
        edges = np.unique(np.geomspace(1, max(2, *values), 60).astype(int))
        axes.hist(values, bins=edges, color=colour)
        for share in ("p50", "p90", "p99"):
            axes.axvline(marks[share], color="black", linewidth=0.8, linestyle=":")
            axes.annotate(
                share, (marks[share], 0.97), xycoords=("data", "axes fraction"), fontsize=8, va="top", rotation=90
            )
        axes.set(xscale="log", xlabel=f"{name} tokens", ylabel="requests")
    figure.suptitle(f"{trace.name}: {summary.requests:,} requests in {summary.duration_s:,.0f} s")
    figure.savefig(path, dpi=110)


def _rate(axes: Any, trace: Trace) -> None:
    width = max(trace.duration_s / _BINS, 1e-3)
    counts = np.bincount((arrival_times(trace) / width).astype(int), minlength=_BINS)
    axes.stairs(counts / width, np.arange(len(counts) + 1) * width, fill=True, color=_BLUE)
    axes.set(xlabel="time, s", ylabel=f"requests/s in windows of {width:.3g} s", ylim=(0, None))


def _gaps(axes: Any, trace: Trace) -> None:
    gaps = np.sort(np.diff(arrival_times(trace)))
    gaps = gaps[gaps > 0]
    if len(gaps):
        left = 1.0 - np.arange(len(gaps)) / len(gaps)
        axes.plot(gaps, left, color=_BLUE, label="this trace")
        axes.plot(gaps, np.exp(-gaps / gaps.mean()), color="black", linewidth=0.8, linestyle=":", label="Poisson")
        axes.set(xscale="log", yscale="log", ylim=(0.5 / len(gaps), 1.5))
        axes.legend(frameon=False)
    axes.set(xlabel="gap between arrivals, s", ylabel="share of longer gaps")
