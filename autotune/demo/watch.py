"""Follow decisions and the engine's gauges during a replay, beside the load. One thread per source, nothing shared."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any

from autotune.decisions import DecisionRecord
from autotune.demo.stack import Stack
from engine.control_client import ControlClient, EngineUnreachable
from engine.tunables import TUNABLES, TunableValue

APPLIED = frozenset({"applied", "converging"})
ANSWERED = APPLIED | {"rejected", "conflict"}  # by the engine; everything else is the guard's word


@dataclass
class Seen:
    """What an arm showed. ``values``: every effective value of every knob, in the order in which it was first seen."""

    decisions: list[DecisionRecord] = field(default_factory=list)
    values: dict[str, list[TunableValue]] = field(default_factory=dict)
    resident: set[tuple[str, int]] = field(default_factory=set)
    kv_usage_peak: float = 0.0
    kv_usage_high_s: float = 0.0  # time with the pool at least 90 % in use
    waiting_peak: int = 0
    running_peak: int = 0
    preemptions: int = 0
    recoded_tokens: int = 0
    evicted_tokens: int = 0

    @property
    def applied(self) -> list[DecisionRecord]:
        return [decision for decision in self.decisions if decision.verdict in APPLIED]

    @property
    def held_back(self) -> int:
        """Proposals that the guard stopped."""
        return sum(decision.verdict not in ANSWERED for decision in self.decisions)

    def used(self, knob: str) -> list[TunableValue]:
        """Values in force at some time, mildest first: read from the engine, and from decisions it confirmed."""
        seen = {*self.values.get(knob, ())}
        for decision in self.applied:
            if decision.knob == knob:
                seen.add(decision.new)
        return [value for value in TUNABLES[knob].values if value in seen]


class Watcher:
    """Polls a stack until stopped; ``on_decision`` is called in the watcher's thread for each new decision."""

    def __init__(self, stack: Stack, on_decision: Callable[[DecisionRecord], None], *, period_s: float = 0.5) -> None:
        self.seen = Seen()
        self._stack = stack
        self._on_decision = on_decision
        self._period_s = period_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> Seen:
        """Read once more and end."""
        self._stopping.set()
        self._thread.join()
        return self.seen

    def _run(self) -> None:
        with ControlClient(self._stack.control, timeout_s=2.0) as control:
            last = False
            while not last:
                last = self._stopping.wait(self._period_s)
                self._read_engine(control)
                self._read_decisions()

    def _read_engine(self, control: ControlClient) -> None:
        try:
            stats = control.stats()
        except EngineUnreachable:
            return
        seen, gauges, counters = self.seen, stats.gauges, stats.counters
        for knob, value in stats.effective.items():
            values = seen.values.setdefault(knob, [])
            if value not in values:
                values.append(value)
        seen.resident |= {(row.kv_format, row.block_size) for row in gauges.resident if row.bytes}
        seen.kv_usage_peak = max(seen.kv_usage_peak, gauges.kv_usage)
        seen.kv_usage_high_s += self._period_s * (gauges.kv_usage >= 0.9)
        seen.waiting_peak = max(seen.waiting_peak, gauges.waiting)
        seen.running_peak = max(seen.running_peak, gauges.running)
        seen.preemptions, seen.recoded_tokens = counters.preemptions, counters.recoded_tokens
        seen.evicted_tokens = counters.evicted_tokens

    def _read_decisions(self) -> None:
        url = self._stack.decisions_url
        if url is None:
            return
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:  # noqa: S310  # our own loopback address
                document: dict[str, Any] = json.load(answer)
            records = [DecisionRecord.from_json(row) for row in document["decisions"]]
        except (OSError, ValueError, HTTPException, KeyError, TypeError):
            return
        known = {decision.tick for decision in self.seen.decisions}
        fresh = {record.tick: record for record in records}
        # Effects are filled in later, so known decisions are replaced by their newest form.
        self.seen.decisions = [fresh.get(decision.tick, decision) for decision in self.seen.decisions]
        for record in records:
            if record.tick not in known:
                self.seen.decisions.append(record)
                self._on_decision(record)
