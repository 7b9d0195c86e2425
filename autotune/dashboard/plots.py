"""What the built-in page plots: figures taken at ticks, kept in a ring of fixed size, given out as JSON.

Memory is bounded whatever happens: the ring is made once, in single precision, and JSON is made column by column.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np

from engine.stats import EngineStats, ResidentBytes
from engine.tunables import TUNABLES
from envs.spaces import Observation
from envs.window import amount

OBSERVED: Final = (
    "load", "kv_usage", "kv_demand", "running", "waiting", "offered_rps", "completed_rps", "goodput_rps",
    "slo_attainment", "ttft_tail_s", "tbt_tail_s",
)  # fmt: skip
"""Features of the observation; the tails are of the quantile that the targets name."""
FORMATS: Final[Mapping[str, str]] = {str(name): f"kv_{name}_bytes" for name in TUNABLES["kv_format"].values}
OTHER_FORMATS: Final = "kv_other_bytes"
COLUMNS: Final = (*OBSERVED, "ttft_target_s", "tbt_target_s", "kv_pool_bytes", *FORMATS.values(), OTHER_FORMATS)
SIZE: Final = 1200
EVERY_S: Final = 3.0
"""SIZE points at least so far apart: an hour, in about 100 kB."""


def plotted(
    observation: Observation, reading: EngineStats | None, ttft_target_s: float, tbt_target_s: float
) -> dict[str, float | None]:
    """One point, by column. ``reading`` None, or not fresh any more: what it would tell is unknown, and not 0."""
    values: dict[str, float | None] = {name: observation.values.get(name) for name in OBSERVED}
    values |= {"ttft_target_s": ttft_target_s, "tbt_target_s": tbt_target_s}
    if reading is None:
        return values
    values["kv_pool_bytes"] = amount(reading.gauges.kv_pool_bytes)
    rows: list[ResidentBytes] | None = getattr(reading.gauges, "resident", None)
    if rows is None:  # an engine of another make does not tell
        return values
    resident = dict.fromkeys((*FORMATS.values(), OTHER_FORMATS), 0.0)
    for row in rows:
        resident[FORMATS.get(row.kv_format, OTHER_FORMATS)] += amount(row.bytes) or 0.0
    return values | resident


class PlotHistory:
    """The newest ``size`` points, at least ``every_s`` apart. The loop adds, other threads read."""

    def __init__(self, columns: Iterable[str] = COLUMNS, *, size: int = SIZE, every_s: float = EVERY_S) -> None:
        self.columns, self.size, self.every_s = tuple(columns), size, every_s
        self._wall_s = np.zeros(size)
        self._values = np.full((len(self.columns), size), math.nan, np.float32)
        self._added = 0  # ever; point number n, from 1, lies at (n - 1) % size
        self._last_ns: int | None = None
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """What the ring takes, full or empty."""
        return self._wall_s.nbytes + self._values.nbytes

    def add(self, now_ns: int, wall_s: float, values: Mapping[str, float | None]) -> None:
        """Keep a point unless the last one is too young. Unknown and infinite values are kept as unknown."""
        if self._last_ns is not None and now_ns - self._last_ns < self.every_s * 1e9:
            return
        known = [values.get(name) for name in self.columns]
        with self._lock, np.errstate(over="ignore"):
            place = self._added % self.size
            self._wall_s[place] = wall_s
            self._values[:, place] = [math.nan if value is None else value for value in known]
            self._values[~np.isfinite(self._values[:, place]), place] = math.nan
            self._added += 1
            self._last_ns = now_ns

    def json_since(self, after: int) -> str:
        """A JSON object: ``last``, the number of the newest point (from 1), and of all points after number ``after``
        that are still held ``t``, wall seconds, and ``columns``, by name, null where unknown. Values have 4 digits.
        """
        with self._lock:
            last = self._added
            first = max(0 if after > last else after, last - self.size)
            places = np.arange(first, last) % self.size
            times = ",".join(f"{value:.3f}" for value in self._wall_s[places].tolist())
            columns = ",".join(
                f'"{name}":[{_numbers(self._values[index, places].tolist())}]'
                for index, name in enumerate(self.columns)
            )
        return f'{{"last":{last},"t":[{times}],"columns":{{{columns}}}}}'


def _numbers(values: list[float]) -> str:
    return ",".join("null" if math.isnan(value) else f"{value:.4g}" for value in values)
