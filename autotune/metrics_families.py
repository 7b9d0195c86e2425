"""Metric families of the daemon's page. Unknown is NaN, or absent where a number is needed, never 0."""

from __future__ import annotations

import math
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from engine.stats import Histogram


def histogram(name: str, text: str, values: Histogram | None, steps: range) -> HistogramMetricFamily:
    """``steps``: which of the buckets' bounds are shown; no samples where unknown."""
    family = HistogramMetricFamily(name, text)
    if values is None:
        return family
    buckets, seen, start = [], 0, 0
    for index in steps:
        seen += sum(values.counts[start : index + 1])
        start = index + 1
        buckets.append((f"{values.bound_s(index):.6g}", float(seen)))
    buckets.append(("+Inf", float(values.count)))
    family.add_metric([], buckets, values.sum_s)
    return family


def states(name: str, text: str, label: str, names: Iterable[str], current: str) -> GaugeMetricFamily:
    """1 for the state that it is in, 0 for the others."""
    family = GaugeMetricFamily(name, text, labels=[label])
    for state in names:
        family.add_metric([str(state)], float(state == current))
    return family


def gauge(name: str, text: str, value: float | None) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=or_nan(value))


def counter(name: str, text: str, value: float | None) -> CounterMetricFamily:
    """Absent where unknown: a counter that is no number would spoil every rate."""
    return CounterMetricFamily(name, text, value=value)


def or_nan(value: float | None) -> float:
    return math.nan if value is None else float(value)
