"""A month of ticks at an injected clock: does the journal stay in its bounds, does memory stay flat?

The daemon's own loop, journal and housekeeping in this process, over an engine of figures alone with a day's curve and
noise. One reading and one tick in ten seconds, not one a second: 259,200 of each, for which a core has time. The bounds
of the journal are so low that they are reached many times over. An operator takes knobs and gives them back, the engine
goes away, comes back and is restarted, and the configuration is reloaded every day.
"""

from __future__ import annotations

import gc
import os
import random
from pathlib import Path
from typing import Any, Final

import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from autotune.bench.context import Context, Outcome
from autotune.bench.flat import rise_mb
from autotune.bench.noisy_engine import NoisyEngine
from autotune.bench.processes import resident_bytes
from autotune.bench.stand import folder_bytes
from autotune.config import load_config
from autotune.daemon import Daemon, Surroundings
from autotune.journal_file import read_ticks
from autotune.wiring import build_parts, check_rules
from engine.clock import ManualClock
from engine.control_client import EngineUnreachable

_TICK_S: Final = 10
_MONTH_S: Final = 30 * 86_400
_PRUNE_S: Final = 300  # housekeeping's default
_MAX_BYTES: Final = 24 << 20
_MAX_ROWS: Final = 20_000
_GROWTH_MB: Final = 3.0  # the allocator's own ups and downs
_FLAT_MB: Final = 1.0  # over the last half: see autotune.bench.flat
_WARM_UP: Final = 0.1  # of the ticks, before which memory is still being filled
_CONFIG: Final[dict[str, Any]] = {
    "tick_s": _TICK_S,
    "window_s": 60,
    "long_window_s": 300,
    "engine": {"poll_s": _TICK_S, "stale_after_s": 30},
    "admin": {"enabled": False},
    "journal": {"max_rows": _MAX_ROWS, "max_bytes": _MAX_BYTES},
}


class _NoWaiter:
    """The clock is moved by hand: nothing waits."""

    def wait_until(self, _deadline_ns: int) -> None:
        return None

    def wake(self) -> None:
        return None


def run(context: Context) -> Outcome:
    number = context.ticks or (6_000 if context.quick else _MONTH_S // _TICK_S)
    month = _Month(context, context.place("month"))
    try:
        return month.run(number)
    finally:
        month.close()


class _Month:
    def __init__(self, context: Context, folder: Path) -> None:
        self._context, self._rng = context, random.Random(context.seed)
        self._clock = ManualClock(start_ns=5_000_000_000)
        self._engine = NoisyEngine(self._clock, self._rng)
        self._path = folder / "daemon.yaml"
        self._write_config(day=0)
        config = load_config(self._path)
        rules, self._registry = check_rules(config), CollectorRegistry()
        environment = {"STATE_DIRECTORY": str(folder)}
        self._parts = build_parts(
            config, rules, control=self._engine,
            clock=self._clock, waiter=_NoWaiter(), registry=self._registry, environment=environment,
        )  # fmt: skip
        around = Surroundings(self._clock, self._registry, environment, pid=1, boot="month")
        self._daemon = Daemon(self._path, config, rules, self._parts, around)
        self._owned: str | None = None

    def close(self) -> None:
        self._parts.journal.close()

    def run(self, number: int) -> Outcome:
        context, loop, journal = self._context, self._daemon.loop, self._parts.journal
        journal.start_run(loop.run_id, "{}")
        begin_ns, peak_bytes, pruned_at = context.clock.now_ns(), 0, 0
        memory: list[int] = []
        while loop.ticks < number:
            due_ns = loop.turn()
            self._clock.advance_s(max(0, due_ns - self._clock.now_ns()) / 1e9)
            if (loop.ticks - pruned_at) * _TICK_S >= _PRUNE_S:
                pruned_at = loop.ticks
                peak_bytes = max(peak_bytes, folder_bytes(journal.path))
                journal.prune(_MAX_ROWS, _MAX_BYTES)
                generate_latest(self._registry)  # as a scrape does
                self._disturb(loop.ticks)
            if loop.ticks >= len(memory) * number // 100 and len(memory) < 101:
                gc.collect()
                memory.append(resident_bytes(os.getpid()))
                if len(memory) % 10 == 1:
                    took_s = (context.clock.now_ns() - begin_ns) / 1e9
                    context.log(
                        f"month: {loop.ticks} of {number} ticks, {took_s:.0f} s, {memory[-1] / 1e6:.1f} MB resident, "
                        f"journal {folder_bytes(journal.path) / 1e6:.1f} MB, {journal.counters.pruned} rows pruned"
                    )
        took_s = (context.clock.now_ns() - begin_ns) / 1e9
        warm = max(1, round(_WARM_UP * 100))
        base = max(memory[warm - 1 : warm + 1])
        figures: dict[str, Any] = {
            "month_ticks": loop.ticks,
            "month_tick_s": _TICK_S,
            "month_days": round(loop.ticks * _TICK_S / 86_400, 2),
            "month_ms_per_tick": round(1e3 * took_s / loop.ticks, 2),
            "month_journal_mb": round(peak_bytes / 1e6, 1),
            "month_journal_bound_mb": round(_MAX_BYTES / 1e6, 1),
            "month_journal_pruned_rows": journal.counters.pruned,
            "month_journal_rows": len(read_ticks(journal.path, limit=1_000_000)),
            "month_memory_growth_mb": round((memory[-1] - base) / 1e6, 2),
            "month_memory_rise_mb": rise_mb(memory),
            "month_memory_mb": [round(value / 1e6, 1) for value in memory[::10]],
            "month_changes": self._registry_total("autotune_decisions_total", verdict="applied"),
            "month_engine_restarts": self._engine.instances - 1,
            "month_tick_errors": self._registry_total("autotune_tick_errors_total"),
            "month_series": sum(not line.startswith(b"#") for line in generate_latest(self._registry).splitlines()),
        }
        outcome = Outcome(figures)
        outcome.bar("month_memory_growth_mb", _GROWTH_MB)
        outcome.bar("month_memory_rise_mb", _FLAT_MB)
        if not figures["month_changes"]:
            outcome.missed.append("the daemon changed nothing: this was no month")
        # Between two prunes the file may grow by what is written meanwhile, and the log of writes lies beside it.
        outcome.bar("month_journal_mb", 1.5 * _MAX_BYTES / 1e6)
        outcome.bar("month_journal_rows", _MAX_ROWS + _PRUNE_S // _TICK_S)
        outcome.bar("month_tick_errors", 0)
        return outcome

    def _registry_total(self, name: str, **labels: str) -> int:
        return round(
            sum(
                sample.value
                for family in self._registry.collect()
                for sample in family.samples
                if sample.name == name and labels.items() <= sample.labels.items()
            )
        )

    def _write_config(self, day: int) -> None:
        document = {**_CONFIG, "targets": {"ttft_s": 1 + day % 2, "tbt_s": 0.1}}
        self._path.write_text(yaml.safe_dump(document), encoding="utf-8")

    def _disturb(self, ticks: int) -> None:
        """Every five minutes of the month something may happen; every day the configuration is another one."""
        rng, engine = self._rng, self._engine
        if ticks * _TICK_S % 86_400 < _PRUNE_S:
            self._write_config(ticks * _TICK_S // 86_400)
            self._daemon.request_reload()
        engine.is_away = rng.random() < 1 / 200
        if rng.random() < 0.002:
            engine.restart()
        if rng.random() < 0.02:
            try:
                knob = self._owned or rng.choice(("kv_format", "block_size"))
                value = engine.tunables()["desired"][knob]
                writer = "release:operator:bench" if self._owned else "operator:bench"
                engine.patch({knob: value}, writer=writer, reason="bench")
                self._owned = None if self._owned else knob
            except EngineUnreachable:
                pass
