"""From a page to a reading: the figures that a page has under the engine's own names, None for all that it has not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from autotune.adapters.buckets import ascending, merged, rebinned
from autotune.adapters.names import MetricNames
from autotune.adapters.page import Page, Sample, View
from engine.stats import Counters, EngineStats, Gauges, Histogram
from engine.tunables import TunableValue

_HISTOGRAMS: Final = ("ttft", "itl", "e2e", "queue", "prompt_lengths", "output_lengths")
_PER_TOKEN: Final = 1000  # lengths are in thousands of tokens there


@dataclass
class PartialStats(EngineStats):
    """A reading of an engine that does not tell everything: any counter, gauge, histogram or limit in it may be None.

    ``capacity_tokens``: what the KV pool holds. ``decode_request_s``: cumulative, time that requests spent decoding,
    added up over requests; over tokens generated it is the mean gap between two tokens of a request.
    """

    capacity_tokens: int | None = None
    decode_request_s: float | None = None


@dataclass(frozen=True)
class Told:
    """What is known of an engine besides its figures."""

    model: str = ""
    effective: Mapping[str, TunableValue] | None = None
    slots: int | None = None
    max_model_len: int | None = None
    capacity_tokens: int | None = None


def view_of(page: Page, names: MetricNames, engine: str, engines: Sequence[str]) -> View:
    return View(page, names.engine, engine, alone=len(engines) == 1, only=names.only)


def engines_of(page: Page, names: MetricNames) -> list[str]:
    """The labels of the engines on a page; one empty label where it has none."""
    return page.labels(names.engine, names.prefix) or [""]


def reading_of(view: View, names: MetricNames, stamp_ns: int) -> PartialStats:
    """The figures of one engine; who it is and its knobs are not on every page, see :func:`with_told`."""
    counters: dict[str, Any] = dict.fromkeys(item.name for item in fields(Counters))
    for name, candidates in names.counters.items():
        counters[name] = _whole(view.total(*candidates))
    for name, (candidates, label, values) in names.ended.items():
        if view.samples(*candidates):
            counters[name] = sum(_whole(view.total(*candidates, **{label: value})) or 0 for value in values)
    gauges: dict[str, Any] = dict.fromkeys(item.name for item in fields(Gauges))
    for name, candidates in names.gauges.items():
        gauges[name] = view.total(*candidates)
    for name in ("running", "waiting"):
        gauges[name] = _whole(gauges[name])
    counters["requests_offered"] = _arrivals(counters, gauges)
    limits: dict[str, Any] = {"max_model_len": None, "max_num_seqs": None}
    histograms: dict[str, Any] = dict.fromkeys(_HISTOGRAMS)
    for name, candidates in names.histograms.items():
        histograms[name] = _histogram(view, candidates, 1)
    for name, candidates in names.lengths.items():
        histograms[name] = _histogram(view, candidates, _PER_TOKEN)
    return PartialStats(
        instance="",
        model="",
        stamp_ns=stamp_ns,
        revision=0,
        effective={},
        counters=Counters(**counters),
        gauges=Gauges(**gauges),
        capacity_tokens=_whole(view.total(*names.capacity_tokens)),
        decode_request_s=view.total(*names.decode_request_s),
        **limits,
        **histograms,
    )


def with_told(reading: PartialStats, told: Told) -> PartialStats:
    """The reading with what is known besides."""
    known: dict[str, Any] = {
        "model": told.model,
        "effective": dict(told.effective or {}),
        "max_num_seqs": told.slots,
        "max_model_len": told.max_model_len,
        "capacity_tokens": told.capacity_tokens or reading.capacity_tokens,
    }
    return replace(reading, **known)


def _arrivals(counters: Mapping[str, Any], gauges: Mapping[str, Any]) -> int | None:
    """Whoever has ended, was refused, or is there: nobody tells of arrivals. None where that is not told either."""
    parts: list[int | None] = [counters["requests_completed"], gauges["running"], gauges["waiting"]]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    return sum(known) + sum(counters[f"requests_{end}"] or 0 for end in ("aborted", "failed", "rejected"))


def _histogram(view: View, candidates: Sequence[str], divisor: float) -> Histogram | None:
    for name in candidates:
        samples = view.samples(f"{name}_bucket")
        if not samples:
            continue
        rows: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
        for sample in samples:
            bound = _bound(sample)
            if bound is None:
                return None
            rows.setdefault(_without_le(sample), []).append((bound / divisor, sample.value))
        together = merged([sorted(row) for row in rows.values()])
        total = view.total(f"{name}_sum")
        return rebinned(together, None if total is None else total / divisor) if ascending(together) else None
    return None


def _bound(sample: Sample) -> float | None:
    """A bucket's upper bound, None for one that has none."""
    try:
        bound = float(sample.labels.get("le", "nan"))
    except ValueError:
        return None
    return None if math.isnan(bound) else bound


def _without_le(sample: Sample) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((key, value) for key, value in sample.labels.items() if key != "le"))


def _whole(value: float | None) -> int | None:
    return None if value is None or value < 0 else round(value)
