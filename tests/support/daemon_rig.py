"""A daemon's loop over a fake engine under a clock that tests move by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from fakes_engine import FakeEngine
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from autotune.config import Config, parse_config
from autotune.daemon import Daemon, Surroundings
from autotune.journal_file import Tick, read_ticks
from autotune.wiring import build_parts, check_rules
from engine.clock import ManualClock

BASE = {"tick_s": 1, "window_s": 10, "engine": {"poll_s": 0.5}, "admin": {"enabled": False}}


class NoWaiter:
    """Never waits: tests drive the loop by turns."""

    def wait_until(self, _deadline_ns: int) -> None:
        raise AssertionError("a test drives turns itself")

    def wake(self) -> None:
        pass


class Rig:
    """Engine, daemon and clock. ``config`` is YAML on top of a base with a tick of 1 s and a window of 10 s."""

    def __init__(self, folder: Path, config: str = "", *, engine: Any = None, clock: ManualClock | None = None) -> None:
        self.clock = clock or ManualClock(start_ns=5_000_000_000)
        self.engine = engine or FakeEngine(self.clock)
        self.folder = folder
        self.config_path = folder / "daemon.yaml"
        self.write_config(config)
        self.environment: dict[str, str] = {"STATE_DIRECTORY": str(folder)}
        self.registry = CollectorRegistry()
        self.config: Config = parse_config(self.config_path.read_text())
        rules = check_rules(self.config)
        self.parts = build_parts(
            self.config,
            rules,
            control=self.engine,
            clock=self.clock,
            waiter=NoWaiter(),
            registry=self.registry,
            environment=self.environment,
        )
        around = Surroundings(self.clock, self.registry, self.environment, pid=1, boot="boot-1")
        self.daemon = Daemon(self.config_path, self.config, rules, self.parts, around)
        self.loop = self.daemon.loop

    def write_config(self, text: str) -> None:
        """Write the configuration file: YAML on top of the base."""
        self.config_path.write_text(yaml.safe_dump({**BASE, **(yaml.safe_load(text) or {})}))

    def run_s(self, seconds: float, each_s: Callable[[], None] | None = None) -> None:
        """Let the loop run for so long; ``each_s`` is called at every full second, before the loop's turn."""
        end_ns = self.clock.now_ns() + round(seconds * 1e9)
        next_s = self.clock.now_ns()
        while self.clock.now_ns() < end_ns:
            if each_s is not None and self.clock.now_ns() >= next_s:
                each_s()
                next_s += 1_000_000_000
            due_ns = min(self.loop.turn(), end_ns)
            self.clock.advance_s(max(0, due_ns - self.clock.now_ns()) / 1e9)

    def ticks(self) -> list[Tick]:
        """Everything journalled so far."""
        return read_ticks(self.parts.journal.path, limit=100_000)

    def decisions(self) -> list[tuple[str, Any, str]]:
        """(knob, value, verdict) of everything shown to people."""
        return [(r.knob, r.new, r.verdict) for r in self.parts.decisions.recent(500)]

    def metric(self, sample: str, **labels: str) -> float | None:
        """The value of one sample of a scrape, None if it is absent."""
        text = generate_latest(self.registry).decode()
        for family in text_string_to_metric_families(text):
            for found in family.samples:
                if found.name == sample and found.labels == labels:
                    return found.value
        return None

    def close(self) -> None:
        self.parts.journal.close()
