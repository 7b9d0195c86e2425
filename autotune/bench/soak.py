"""Hours at the highest load that this machine sustains, while an operator turns every knob at random.

``python -m autotune.bench.soak --hours 2``: finds the rate, takes 90 % of it, and looks at memory, failed requests and
the cache's own books all the while. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

from autotune.bench.context import Context, Outcome
from autotune.bench.flat import rise_mb
from autotune.bench.processes import resident_bytes
from autotune.bench.stand import Stand
from autotune.bench.traffic import Load, Traffic
from autotune.demo.bundled import bundled_model
from autotune.writers import OPERATOR_PREFIX, RELEASE_PREFIX
from engine.clock import RealClock
from engine.control_client import EngineUnreachable
from engine.tunables import TUNABLES, TunableValue

_POOL_BYTES: Final = 16 << 20
_HOST_BYTES: Final = 16 << 20
_SHARE: Final = 0.9
_PROBE_S: Final = 20.0
_PROBES: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
_BISECTIONS: Final = 3
_SAMPLE_S: Final = 5.0
_AUDIT_S: Final = 30.0
_CHANGES_S: Final = (2.0, 8.0)
_RELEASES: Final = 0.3  # share of an operator's moves that give all knobs back, so that the daemon has its turn
# Flat: over the last half (autotune.bench.flat), and all in all since the first tenth.
_FLAT_MB: Final = {"engine": 10.0, "daemon": 1.0}
_GROWTH_MB: Final = {"engine": 25.0, "daemon": 3.0}
# Below these the load is not sustainable any more and requests only queue.
_LEAST: Final = {"max_num_seqs": 16, "max_num_batched_tokens": 128}
_CONFIG: Final[dict[str, Any]] = {"policy": {"rules": "default", "quality_budget": None}}


def soak(context: Context, hours: float, rate: float | None = None) -> Outcome:
    """``rate``: requests a second, found by probing if None."""
    extra = ("--max-waiting", "100000", "--host-pool-bytes", str(_HOST_BYTES))
    with Stand(context, "soak", _CONFIG, pool_bytes=_POOL_BYTES, extra=extra) as stand:
        most = rate or _highest(context, stand)
        context.log(f"soak: {most:.2f} requests/s is sustained, {_SHARE * most:.2f} for {hours:g} hours from here on")
        return _Soak(context, stand, _SHARE * most).run(hours * 3600.0)


def _highest(context: Context, stand: Stand) -> float:
    """The highest rate at which nothing queues up, by doubling and bisection."""
    low, high = 0.0, None
    for rate in _PROBES:
        if not _is_sustained(context, stand, rate):
            high = rate
            break
        low = rate
    for _ in range(_BISECTIONS if high is not None and low else 0):
        middle = (low + (high or low)) / 2
        low, high = (middle, high) if _is_sustained(context, stand, middle) else (low, middle)
    if not low:
        raise RuntimeError(f"not even {_PROBES[0]:g} requests/s are sustained")
    return low


def _is_sustained(context: Context, stand: Stand, rate: float) -> bool:
    traffic = Traffic(stand.stack.url, Load(lambda _: rate), context.clock, context.seed)
    traffic.start()
    waiting: list[int] = []
    begin_ns = context.clock.now_ns()
    while (passed_s := (context.clock.now_ns() - begin_ns) / 1e9) < _PROBE_S:
        reading = stand.stats()
        if reading is not None and passed_s > _PROBE_S / 2:
            waiting.append(reading.gauges.waiting)
        stand.sleep(0.5)
    tally = traffic.stop()
    is_sustained = bool(waiting) and fmean(waiting) < 1.0 and not tally.failed
    context.log(
        f"soak: {rate:.2f} requests/s: {fmean(waiting):.1f} waiting: {'sustained' if is_sustained else 'too much'}"
    )
    return is_sustained


class _Soak:
    def __init__(self, context: Context, stand: Stand, rate: float) -> None:
        self._context, self._stand, self._rate = context, stand, rate
        self._rng = random.Random(context.seed)
        self._asked: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._audits: list[str | None] = []
        self._audit_s: list[float] = []
        self._unreachable = 0

    def run(self, seconds: float) -> Outcome:
        context, stand, rng = self._context, self._stand, self._rng
        traffic = Traffic(stand.stack.url, Load(lambda _: self._rate), context.clock, context.seed)
        traffic.start()
        begin_ns = context.clock.now_ns()
        memory: list[tuple[int, int]] = []
        due_s = {"sample": 0.0, "audit": 0.0, "change": 0.0, "tell": 0.0}
        try:
            while (now_s := (context.clock.now_ns() - begin_ns) / 1e9) < seconds and self._all_live():
                if now_s >= due_s["sample"]:
                    memory.append((resident_bytes(stand.engine.pid), resident_bytes(stand.daemon.pid)))
                    due_s["sample"] += _SAMPLE_S
                if now_s >= due_s["audit"]:
                    self._audit()
                    due_s["audit"] = now_s + _AUDIT_S
                if now_s >= due_s["change"]:
                    self._turn()
                    due_s["change"] = now_s + rng.uniform(*_CHANGES_S)
                if now_s >= due_s["tell"]:
                    due_s["tell"] += max(15.0, seconds / 100)
                    self._tell(now_s, memory[-1], traffic)
                stand.sleep(0.1)
        finally:
            tally = traffic.stop()
        idle = self._held_when_idle()
        self._audit()
        died = sum(not child.is_alive for child in (stand.engine, stand.daemon))
        columns = dict(zip(("engine", "daemon"), zip(*memory, strict=True), strict=True))
        figures: dict[str, Any] = {
            "soak_hours": round(seconds / 3600, 3),
            "soak_rps": round(self._rate, 2),
            "soak_requests": tally.sent,
            "soak_completed": tally.completed,
            "soak_failed": len(tally.failed) + tally.cancelled,
            "soak_failures": [f"{one.kind}: {one.message}" for one in tally.failed[:10]],
            "soak_operator_changes": dict(sorted(self._asked.items())),
            "soak_refused_changes": dict(sorted(self._refused.items())),
            "soak_daemon_changes": _own_changes(stand),
            "soak_audits": len(self._audits),
            "soak_audit_problems": [problem for problem in self._audits if problem is not None][:10],
            "soak_audit_ms": [round(1e3 * f(self._audit_s), 1) for f in (median, max)],
            "soak_unreachable": self._unreachable,
            "soak_held_when_idle_bytes": idle,
            **{f"soak_{name}_memory_rise_mb": rise_mb(column) for name, column in columns.items()},
            **{f"soak_{name}_memory_growth_mb": _growth(column) for name, column in columns.items()},
            **{f"soak_{name}_memory_mb": _course(column) for name, column in columns.items()},
            "soak_died": died,
            "soak_tracebacks": stand.engine.tracebacks() + stand.daemon.tracebacks(),
        }
        outcome = Outcome(figures)
        for name in columns:
            outcome.bar(f"soak_{name}_memory_rise_mb", _FLAT_MB[name])
            outcome.bar(f"soak_{name}_memory_growth_mb", _GROWTH_MB[name])
        for name in (
            "soak_failed", "soak_held_when_idle_bytes", "soak_died", "soak_tracebacks", "soak_unreachable"
        ):  # fmt: skip
            outcome.bar(name, 0)
        for name in ("soak_completed", "soak_audits", "soak_operator_changes", "soak_daemon_changes"):
            if not figures[name]:
                outcome.missed.append(f"{name} is {figures[name]}: this was no soak")
        outcome.missed += figures["soak_audit_problems"]
        return outcome

    def _all_live(self) -> bool:
        return self._stand.engine.is_alive and self._stand.daemon.is_alive

    def _audit(self) -> None:
        try:
            found = self._stand.control.audit()
        except EngineUnreachable as error:
            self._unreachable += 1
            self._context.log(f"soak: {error}")
            return
        self._audits.append(found["problem"])
        self._audit_s.append(found["took_s"])
        if found["problem"] is not None:
            self._context.log(f"soak: {found['problem']}")

    def _turn(self) -> None:
        """One move of the operator's: a knob to any of its values, or all of them back to the daemon."""
        rng, control = self._rng, self._stand.control
        writer, changes = f"{OPERATOR_PREFIX}soak", dict[str, TunableValue]()
        try:
            if rng.random() < _RELEASES:
                writer, changes = f"{RELEASE_PREFIX}{writer}", dict(control.tunables()["desired"])
                self._asked["release"] += 1
            else:
                knob = rng.choice(list(TUNABLES))
                least = _LEAST.get(knob, 0)
                allowed = [value for value in TUNABLES[knob].values if isinstance(value, str) or value >= least]
                changes = {knob: rng.choice(allowed)}
                self._asked[knob] += 1
            answer = control.patch(changes, writer=writer, reason="soak")
        except EngineUnreachable:
            self._unreachable += 1
            return
        for knob, result in answer["results"].items():
            self._refused[knob] += result["status"] in {"rejected", "conflict"}

    def _held_when_idle(self) -> int | None:
        """KV that is still held five seconds after the last request: 0, or something leaks."""
        self._stand.sleep(5.0)
        reading = self._stand.stats()
        return None if reading is None else reading.gauges.kv_used_bytes - reading.gauges.kv_pinned_bytes

    def _tell(self, now_s: float, memory: tuple[int, int], traffic: Traffic) -> None:
        tally = traffic.tally
        self._context.log(
            f"soak: {now_s / 60:.1f} min, {tally.completed} of {tally.sent} completed, {len(tally.failed)} failed, "
            f"engine {memory[0] / 1e6:.0f} MB, daemon {memory[1] / 1e6:.1f} MB, "
            f"{sum(problem is not None for problem in self._audits)} of {len(self._audits)} audits found something"
        )


def _growth(values: Sequence[int]) -> float:
    """Megabytes from the second tenth to the last one, medians: the first tenth is still warming up."""
    tenth = max(1, len(values) // 10)
    return round((median(values[-tenth:]) - median(values[tenth : 2 * tenth] or values)) / 1e6, 2)


def _course(values: Sequence[int]) -> list[float]:
    """Eleven readings from start to end, megabytes."""
    last = len(values) - 1
    return [round(values[last * i // 10] / 1e6, 1) for i in range(11)]


def _own_changes(stand: Stand) -> int:
    took = {"applied", "converging"}
    return sum(bool(tick.body.get("written")) and tick.body["written"][0] in took for tick in stand.ticks())


def main(argv: Sequence[str] | None = None) -> int:
    """0; 1 when a bar was missed; 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m autotune.bench.soak", description=__doc__)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--rate", type=float, help="sustained requests a second; found by probing if absent")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the last line to a file, too")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="logs and journals")
    given = parser.parse_args(argv)
    folder = given.folder or Path(tempfile.mkdtemp(prefix="kv-soak-"))
    context = Context(bundled_model(), folder, RealClock(), lambda line: print(line, flush=True), given.seed)
    outcome = soak(context, given.hours, given.rate)
    finished = datetime.now(UTC).isoformat(timespec="seconds")
    line = json.dumps({"bench": "soak", **outcome.figures, "missed": outcome.missed, "finished": finished})
    if given.json is not None:
        given.json.write_text(line + "\n", encoding="utf-8")
    print(line)
    return int(bool(outcome.missed))


if __name__ == "__main__":
    sys.exit(main())
