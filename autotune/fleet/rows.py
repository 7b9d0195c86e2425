"""One row per engine out of what Prometheus holds of daemons and engines. Unknown stays unknown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from autotune.fleet.names import DAEMON_GAUGES, ENGINE_GAUGES, FORMAT_KNOBS
from autotune.fleet.prometheus import Series

DONE: Final = ("applied", "converging")
"""Verdicts of decisions that were carried out."""
_TAIL: Final = "95"
_SAME: Final = ("pod", "namespace")
Identity = tuple[str, str]
"""Job and instance, as Prometheus names a target."""


@dataclass(frozen=True)
class Decided:
    """The last decision that was carried out: what, why, and how long ago at most."""

    knob: str
    to: str
    scenario: str
    writer: str
    age_s: float


@dataclass
class Row:
    """One engine. None is unknown. ``daemon``: up, down, or none; ``health``: of the engine, as its daemon or the
    scrape says.
    """

    name: str
    job: str
    instance: str
    daemon: str
    health: str
    mode: str | None = None
    policy: str | None = None
    load: float | None = None
    kv_usage: float | None = None
    kv_format: str | None = None
    kv_shares: dict[str, float] = field(default_factory=dict)  # of resident bytes, by format
    running: float | None = None
    waiting: float | None = None
    ttft_s: float | None = None
    ttft_target_s: float | None = None
    tbt_s: float | None = None
    tbt_target_s: float | None = None
    last_change_age_s: float | None = None
    last_decision: Decided | None = None
    overridden: list[str] = field(default_factory=list)

    @property
    def is_well(self) -> bool:
        return self.health == "ok" and self.daemon != "down"

    def take_from(self, engine: Row) -> None:
        """What the engine's own page tells, while its daemon is down."""
        self.health = engine.health
        self.load, self.kv_usage, self.running, self.waiting = (
            engine.load, engine.kv_usage, engine.running, engine.waiting
        )  # fmt: skip

    @property
    def misses(self) -> list[str]:
        """Targets that the tails are over."""
        pairs = (("ttft", self.ttft_s, self.ttft_target_s), ("tbt", self.tbt_s, self.tbt_target_s))
        return [name for name, tail, target in pairs if tail is not None and target is not None and tail > target]


def rows_of(
    now: Iterable[Series], up: Iterable[Series], lately: Iterable[Series], decisions: Iterable[Series], now_s: float
) -> list[Row]:
    """Rows in order of name.

    ``now``: the series of :data:`autotune.fleet.names.NAMES`; ``up``: of all targets; ``lately``: one series of every
    daemon that was there of late; ``decisions``: counters of decisions, and of ticks beside them, over that time.
    """
    by_target: dict[Identity, list[Series]] = {}
    for series in now:
        by_target.setdefault(_identity(series.labels), []).append(series)
    alive = {_identity(series.labels): series.value == 1 for series in up}
    labels = {_identity(series.labels): series.labels for series in (*up, *lately)}
    decided: dict[Identity, list[Series]] = {}
    for series in decisions:
        decided.setdefault(_identity(series.labels), []).append(series)
    daemons = {_identity(series.labels) for series in lately}
    daemons |= {target for target, found in by_target.items() if any(s.name == "autotune_mode" for s in found)}
    rows = [
        _daemon_row(target, labels, by_target.get(target, []), decided.get(target, []), alive.get(target), now_s)
        for target in daemons
    ]
    paired = {place: row for row in rows for place in _places(labels.get((row.job, row.instance), {}), row.instance)}
    for target, found in by_target.items():
        gauges = [series for series in found if series.name in ENGINE_GAUGES]
        if target in daemons or not gauges:
            continue
        engines = list(_engine_rows(target, gauges, alive.get(target)))
        its_daemon = next((paired[place] for place in _places(gauges[0].labels, target[1]) if place in paired), None)
        if its_daemon is None:
            rows += engines
        elif engines and its_daemon.daemon == "down":
            its_daemon.take_from(engines[0])
    return sorted(rows, key=lambda row: (row.name, row.instance))


def _daemon_row(
    target: Identity,
    labels: Mapping[Identity, Mapping[str, str]],
    found: Sequence[Series],
    decided: Sequence[Series],
    alive: bool | None,
    now_s: float,
) -> Row:
    known = labels.get(target) or (found[0].labels if found else {})
    if alive is False or not found:
        row = Row(_name(known, target), *target, daemon="down", health="unknown")
        row.last_decision = last_decision(decided, now_s)
        return row
    row = Row(
        _name(known, target), *target, daemon="up", health=_state(found, "autotune_engine_health", "state") or "unknown"
    )
    for series in found:
        attribute = DAEMON_GAUGES.get(series.name)
        if attribute is not None:
            setattr(row, attribute, series.value)
    row.mode = _state(found, "autotune_mode", "mode")
    row.policy = _state(found, "autotune_policy", "policy")
    row.kv_format = _stored_as(found)
    row.kv_shares = _shares(found)
    row.ttft_s = _one(found, "autotune_window_ttft_seconds", percentile=_TAIL)
    row.tbt_s = _one(found, "autotune_window_tbt_seconds", percentile=_TAIL)
    row.ttft_target_s = _one(found, "autotune_target_seconds", metric="ttft")
    row.tbt_target_s = _one(found, "autotune_target_seconds", metric="tbt")
    row.overridden = sorted(
        series.labels.get("knob", "") for series in found if series.name == "autotune_override" and series.value
    )
    row.last_decision = last_decision(decided, now_s)
    return row


def _engine_rows(target: Identity, gauges: Sequence[Series], alive: bool | None) -> Iterator[Row]:
    """Engines without a daemon; a page may be several engines', told apart by a label."""
    by_engine: dict[str, Row] = {}
    order = list(ENGINE_GAUGES)
    for series in sorted(gauges, key=lambda series: order.index(series.name)):  # of two names the newer one counts
        gauge = ENGINE_GAUGES[series.name]
        if any(series.labels.get(label, value) != value for label, value in gauge.only.items()):
            continue
        engine = series.labels.get(gauge.engine, "")
        if engine not in by_engine:
            name = _name(series.labels, target) + (f" {gauge.engine} {engine}" if engine not in {"", "0"} else "")
            health = {True: "ok", False: "gone", None: "unknown"}[alive]
            by_engine[engine] = Row(name, *target, daemon="none", health=health)
        if getattr(by_engine[engine], gauge.attribute) is None:
            setattr(by_engine[engine], gauge.attribute, series.value)
    yield from by_engine.values()


def last_decision(series: Iterable[Series], now_s: float) -> Decided | None:
    """The latest rise of a counter of decisions that were carried out; a series that begins later than the others has
    risen then. None where nothing rose in the time that was asked for.
    """
    counters = [one for one in series if one.samples]
    begin = min((one.samples[0][0] for one in counters), default=now_s)
    latest: tuple[float, Series] | None = None
    for one in counters:
        if one.labels.get("verdict") not in DONE:
            continue
        # A counter that is smaller than before began anew, with its daemon, and has risen since.
        rises = [at for (_, before), (at, after) in pairwise(one.samples) if after != before and after > 0]
        if one.samples[0][0] > begin and one.samples[0][1] > 0:
            rises.insert(0, one.samples[0][0])
        if rises and (latest is None or rises[-1] > latest[0]):
            latest = (rises[-1], one)
    if latest is None:
        return None
    at, found = latest
    told = found.labels
    return Decided(
        told.get("knob", "?"),
        told.get("to", "?"),
        told.get("scenario", "?"),
        told.get("writer", "?"),
        max(0.0, now_s - at),
    )


def _identity(labels: Mapping[str, str]) -> Identity:
    return labels.get("job", ""), labels.get("instance", "")


def _name(labels: Mapping[str, str], target: Identity) -> str:
    """What people call it: its pod, else where it is scraped."""
    pod, namespace = labels.get("pod"), labels.get("namespace")
    if pod:
        return f"{namespace}/{pod}" if namespace else pod
    return labels.get("fleet_name") or target[1] or target[0]


def _places(labels: Mapping[str, str], instance: str) -> Iterator[tuple[str, str]]:
    """By what an engine and its daemon are known to belong together: the pod, a label ``fleet_name``, or one page."""
    yield ("instance", instance)
    if labels.get("pod"):
        yield ("pod", "/".join(labels.get(name, "") for name in _SAME))
    if labels.get("fleet_name"):
        yield ("fleet_name", labels["fleet_name"])


def _state(found: Iterable[Series], name: str, label: str) -> str | None:
    """The label of the one series of a set that is 1."""
    return next((series.labels.get(label) for series in found if series.name == name and series.value == 1), None)


def _stored_as(found: Iterable[Series]) -> str | None:
    """The format in force: of an engine that has a knob for keys and one for values, both where they differ."""
    told = {
        series.labels.get("knob", ""): series.labels.get("value", "?")
        for series in found
        if series.name == "autotune_tunable" and series.value == 1
    }
    return "/".join(dict.fromkeys(told[knob] for knob in FORMAT_KNOBS if knob in told)) or None


def _one(found: Iterable[Series], name: str, **labels: str) -> float | None:
    matching = (s for s in found if s.name == name and all(s.labels.get(key) == text for key, text in labels.items()))
    return next((series.value for series in matching), None)


def _shares(found: Iterable[Series]) -> dict[str, float]:
    """Resident bytes by format as shares; empty where nothing is resident or nothing is known."""
    stored: dict[str, float] = {}
    for series in found:
        if series.name == "autotune_kv_resident_bytes" and series.value:
            kv_format = series.labels.get("kv_format", "?")
            stored[kv_format] = stored.get(kv_format, 0.0) + series.value
    total = sum(stored.values())
    return {name: value / total for name, value in sorted(stored.items())} if total else {}
