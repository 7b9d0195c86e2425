"""The metrics that daemon and engine really serve, and the names that an expression of PromQL uses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from autotune.docs import daemon_families
from engine.core_stats import Distributions
from engine.metrics import EngineMetrics
from engine.stats import EngineStats, ResidentBytes
from engine.tunables import default_values
from envs.port import ApplyStatus
from policies.guard import VerdictCode

OF_THE_SCRAPE = frozenset({"job", "instance"})
# Where a page shows one value of many.
_OPEN = {
    "verdict": {*map(str, ApplyStatus), *map(str, VerdictCode), "advised", "off", "masked"},
    "writer": {"autotune", "operator", "startup", "other"},
}


@dataclass
class Known:
    """By sample name: labels with the values that have been seen."""

    labels: dict[str, dict[str, set[str]]] = field(default_factory=dict)

    def add(self, name: str, labels: dict[str, str]) -> None:
        seen = self.labels.setdefault(name, {})
        for label, value in labels.items():
            seen.setdefault(label, set()).add(value)


def known_metrics() -> Known:
    known = Known()
    for family in daemon_families():
        for sample in family.samples:
            known.add(sample.name, sample.labels)
    for family in text_string_to_metric_families(engine_page()):
        for sample in family.samples:
            known.add(sample.name, sample.labels)
    known.add("up", {})
    return known


def engine_page() -> str:
    """The engine's page with one of everything."""
    stats = EngineStats("example", "example", 1, 4096, 64, 1, default_values())
    gauges = stats.gauges
    gauges.resident.append(ResidentBytes("native", 16, 1, 1))
    gauges.memory_rss_bytes = gauges.device_memory_bytes = 1
    gauges.memory_bandwidth_bytes_per_s = gauges.host_link_bytes_per_s = 1.0
    gauges.host_link_is_emulated = True
    gauges.evicted_running_tokens = gauges.evicted_held_bytes = 0
    metrics = EngineMetrics(CollectorRegistry())
    metrics.update(stats, Distributions())
    metrics.http_request("/v1/completions", 200)
    return metrics.page().decode()


_TEXT = re.compile(r'"[^"]*"')
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_SELECTOR = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\s*\{([^}]*)\}")
_MATCHER = re.compile(r'\s*([a-zA-Z_]\w*)\s*(=~|!~|!=|=)\s*"([^"]*)"\s*,?')


def names_in(expression: str) -> set[str]:
    """Metrics and recorded series that an expression names."""
    names = _NAME.findall(_TEXT.sub('""', expression))
    return {name for name in names if name == "up" or name.startswith("autotune_") or ":" in name}


def problems_of(expression: str, known: Known, recorded: frozenset[str] = frozenset()) -> Iterator[str]:
    """What an expression names that nobody serves: metrics, labels, values of labels."""
    for name in names_in(expression):
        if name not in known.labels and name not in recorded:
            yield f"nobody serves {name}"
    for name, inside in _SELECTOR.findall(expression):
        if _MATCHER.sub("", inside).strip():
            yield f"{name}: cannot read {{{inside}}}"
        labels = known.labels.get(name)
        if labels is None:
            continue
        for label, _, text in _MATCHER.findall(inside):
            if label in OF_THE_SCRAPE:
                continue
            if label not in labels:
                yield f"{name} has no label {label}"
                continue
            values = labels[label] | _OPEN.get(label, set())
            yield from (f"{name}: {label} is never {value}" for value in text.split("|") if value not in values)
