"""An episode as a picture: load, KV by format, latency tails against their targets, changes. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from envs.signals import FORMAT_NAMES, Targets


def picture(rows: Sequence[Mapping[str, Any]], targets: Targets) -> NDArray[np.uint8]:
    """uint8 [600, 900, 3]; ``rows``: one per control interval, see :mod:`envs.simulated`."""
    figure = Figure(figsize=(9, 6), dpi=100, layout="constrained")
    canvas: Any = FigureCanvasAgg(figure)
    load, kv, latency = figure.subplots(3, 1, sharex=True)
    times = [row["at_s"] for row in rows]
    load.plot(times, [row["load"] for row in rows], label="load")
    load.plot(times, [row["waiting"] / max(1, row["waiting"] + row["running"]) for row in rows], label="waiting share")
    load.set_ylim(0, 1.05)
    shares = [[row["resident"].get(name, 0) / max(1, row["pool_bytes"]) for row in rows] for name in FORMAT_NAMES]
    kv.stackplot(times, shares, labels=FORMAT_NAMES)
    kv.set_ylabel("share of the pool")
    for name, label, target in (("ttft_tail_s", "TTFT", targets.ttft_s), ("tbt_tail_s", "TBT", targets.tbt_s)):
        values = [np.nan if row[name] is None else row[name] / target for row in rows]
        latency.plot(times, values, label=f"{label} tail / target")
    latency.axhline(1.0, color="grey", linewidth=0.8)
    latency.set_yscale("log")
    latency.set_xlabel("s")
    for row in rows:
        if row["applied"] is not None:
            for axes in (load, kv, latency):
                axes.axvline(row["at_s"], color="grey", linewidth=0.5, linestyle=":")
    for axes in (load, kv, latency):
        axes.legend(loc="upper left", fontsize="small")
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
