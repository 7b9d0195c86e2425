"""kill -9 of daemon and engine at random moments under load, several of them in the middle of a change.

After each the state must be known within one tick of the return, nothing may be written for one full window, the
journal must be whole and decide again as it was; in the end no request may have been lost but with an engine.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from autotune.bench.context import Context, Outcome
from autotune.bench.kill_checks import (
    Timing,
    again_too_soon,
    calm,
    file_intact,
    knows,
    lost,
    replays,
    state_seen,
    unbroken,
)
from autotune.bench.stand import Stand, StandError
from autotune.bench.tap import Moment, Tap
from autotune.bench.traffic import Load, Tally, Traffic
from autotune.journal_file import Tick
from engine.control_client import EngineUnreachable

_KILLS: Final = 200
_TIMING: Final = Timing(tick_s=0.2, poll_s=0.1, window_s=1.0)
_POOL_BYTES: Final = 24 << 20
_AIMS: Final = {"random": 40, "converging": 15, Moment.UNSENT: 15, Moment.UNANSWERED: 15, Moment.ANSWERED: 15}
_OUTPUTS: Final = (100, 400)  # so that there is something to convert
_AIM_S: Final = 4.0  # a change that does not come within this is not waited for
_RETURN_S: Final = 300.0  # far more than a busy machine needs
_MOST_SHOWN: Final = 20
_DWELL_S: Final = 0.4
# What may be found.
UNKNOWN: Final = "state not known within a tick of the return"
BURST: Final = "written in the first window, or again before its time"
LOST: Final = "requests lost, but not with an engine"
JOURNAL: Final = "journal not intact"
DIED: Final = "died otherwise, or a traceback"
_CONFIG: Final[dict[str, Any]] = {
    "tick_s": _TIMING.tick_s,
    "window_s": _TIMING.window_s,
    "long_window_s": 5,
    "engine": {"poll_s": _TIMING.poll_s},
    "targets": {"ttft_s": 10, "tbt_s": 2},
    "policy": {"rules": str(Path(__file__).with_name("restless.yaml")), "quality_budget": None},
    "guard": {
        "dwell_s": {"step": _DWELL_S, "background": _DWELL_S},
        "rates": {"step": {"changes": 10_000}, "background": {"changes": 10_000}},
        "retry_s": 1,
        "effects": {"cool_down_s": 1},
    },
}


def waves(now_s: float) -> float:
    """A burst every three seconds."""
    return 8.0 if now_s % 3.0 < 1.5 else 0.5


def run(context: Context) -> Outcome:
    number = context.kills or (8 if context.quick else _KILLS)
    folder = context.place("kills")
    tapped = folder / "tap.sock"
    with (
        Tap(tapped, folder / "engine.sock", context.clock) as tap,
        Stand(context, "kills", _CONFIG, pool_bytes=_POOL_BYTES, daemon_socket=str(tapped)) as stand,
    ):
        return _Killing(context, stand, tap).run(number)


class _Killing:
    def __init__(self, context: Context, stand: Stand, tap: Tap) -> None:
        self._context, self._stand, self._tap = context, stand, tap
        self._rng = random.Random(context.seed)
        self._outages: list[tuple[int, int]] = []
        self._kinds: Counter[str] = Counter()
        self._mid_change = self._under_load = 0
        self._violations: list[dict[str, Any]] = []
        self._found: Counter[str] = Counter()
        self._slowest_s = self._known_s = 0.0
        self._known_ticks: list[int] = []
        self._last_id = 0

    def run(self, number: int) -> Outcome:
        context, stand = self._context, self._stand
        begin_ns, done = context.clock.now_ns(), 0
        traffic = Traffic(stand.stack.url, Load(waves, outputs=_OUTPUTS), context.clock, context.seed)
        traffic.start()
        try:
            stand.sleep(3 * _TIMING.window_s)
            self._last_id = stand.ticks()[-1].id
            for index in range(1, number + 1):
                done = index
                self._one(index, number, traffic.tally)
        except (StandError, EngineUnreachable) as error:  # it did not come back: the worst that can happen
            self._violation(done, DIED, str(error))
        finally:
            tally = traffic.stop()
        with_engine, others = lost(tally.failed, self._outages)
        if tally.cancelled:
            others.append(f"{tally.cancelled} requests had no end when the load was over")
        for line in others:
            self._violation(0, LOST, line)
        for line in again_too_soon(self._tap.writes, _DWELL_S):
            self._violation(0, BURST, line)
        ticks = stand.ticks()
        for line in [*unbroken(ticks, ticks[0].id - 1), *file_intact(stand.journal), *replays(stand.journal, ticks)]:
            self._violation(0, JOURNAL, line)
        for child in (stand.daemon, stand.engine):
            if child.tracebacks():
                self._violation(0, DIED, f"{child.name}: {child.tracebacks()} tracebacks in its log")
        figures: dict[str, Any] = {
            "kill9_ok": not self._violations and done > 0,
            "kill9_runs": done,
            "kill9_kinds": dict(sorted(self._kinds.items())),
            "kill9_mid_change": self._mid_change,
            "kill9_daemon_under_load": self._under_load,
            "kill9_changes": sum(write.status == 200 for write in self._tap.writes),
            "kill9_ticks": len(ticks),
            "kill9_ticks_until_known": max(self._known_ticks, default=None),
            "kill9_known_s": round(self._known_s, 2),
            "kill9_requests": tally.sent,
            "kill9_completed": tally.completed,
            "kill9_lost_with_engine": with_engine,
            "kill9_lost_otherwise": len(tally.failed) - with_engine + tally.cancelled,
            "kill9_found": {what: self._found[what] for what in (UNKNOWN, BURST, LOST, JOURNAL, DIED)},
            "kill9_violations": self._violations[:_MOST_SHOWN],
            "kill9_slowest_s": round(self._slowest_s, 1),
            "kill9_s": round((context.clock.now_ns() - begin_ns) / 1e9, 1),
        }
        missed = [] if figures["kill9_ok"] else [f"{len(self._violations)} violations after kills"]
        # Fewer would show nothing, whatever was found.
        least = {"kill9_mid_change": number // 10, "kill9_daemon_under_load": 1, "kill9_changes": 1}
        missed += [
            f"{name} is {figures[name]}, at least {wanted} are wanted"
            for name, wanted in least.items()
            if figures[name] < wanted
        ]
        return Outcome(figures, missed)

    def _one(self, index: int, number: int, tally: Tally) -> None:
        clock, stand = self._context.clock, self._stand
        begin_ns = clock.now_ns()
        victim = self._rng.choice(("daemon", "engine"))
        child = stand.daemon if victim == "daemon" else stand.engine
        died_ns: list[int] = []
        in_flight: list[int] = []

        def kill() -> None:
            died_ns.append(clock.now_ns())  # before it, or a client might notice first
            in_flight.append(tally.sent - tally.completed - tally.cancelled - len(tally.failed))
            child.kill()

        aim = self._aimed(kill)
        child.reap()
        (killed_ns,) = died_ns
        self._kinds[f"{victim}: {aim}"] += 1
        self._mid_change += aim != "random"
        self._under_load += victim == "daemon" and in_flight[0] > 0
        child.start()
        found = self._daemon_back(killed_ns) if victim == "daemon" else self._engine_back(killed_ns)
        ticks = stand.ticks(self._last_id)
        books = [*unbroken(ticks, self._last_id), *file_intact(stand.journal), *replays(stand.journal, ticks)]
        found += [(JOURNAL, line) for line in books]
        if ticks:
            self._last_id = ticks[-1].id
        for what, line in found:
            self._violation(index, what, f"{victim}, {aim}: {line}")
        took_s = (clock.now_ns() - begin_ns) / 1e9
        self._slowest_s = max(self._slowest_s, took_s)
        word = "ok" if not found else f"{len(found)} violations: {found[0][1]}"
        self._context.log(f"kills: {index} of {number}, {victim}, {aim}, {took_s:.1f} s: {word}")

    def _aimed(self, kill: Callable[[], None]) -> str:
        """Kill as drawn; what it was in the end."""
        stand, rng = self._stand, self._rng
        aim = rng.choices(list(_AIMS), weights=list(_AIMS.values()))[0]
        stand.sleep(rng.uniform(0.0, 1.5 if aim == "random" else 0.3))
        if isinstance(aim, Moment):
            self._tap.arm(aim, kill)
            if self._tap.fired.wait(_AIM_S) or not self._tap.disarm():
                self._tap.fired.wait()
                return aim
        elif aim == "converging":
            deadline_ns = self._context.clock.now_ns() + round(_AIM_S * 1e9)
            while self._context.clock.now_ns() < deadline_ns:
                if self._is_converging():
                    kill()
                    return aim
        kill()
        return "random"

    def _is_converging(self) -> bool:
        try:
            return self._stand.control.tunables()["progress"]["converged_fraction"] < 1.0
        except EngineUnreachable:
            return False

    def _daemon_back(self, killed_ns: int) -> list[tuple[str, str]]:
        """Wait for the next daemon's first window; what was wrong in it."""
        stand = self._stand
        last_run = self._newest_run()

        def new_ticks() -> list[Tick]:
            return [tick for tick in stand.ticks(self._last_id) if tick.run != last_run]

        stand.wait(lambda: bool(new_ticks()), "a tick of the next daemon", stand.daemon, _RETURN_S)
        first = new_ticks()[0]
        view = stand.control.tunables()
        problems = [(UNKNOWN, line) for line in state_seen(first, view)]
        self._known_ticks.append(next((n for n, t in enumerate(new_ticks(), 1) if t.body.get("health") == "ok"), 0))
        end_ns = first.stamp_ns + round(_TIMING.window_s * 1e9)
        stand.wait(lambda: new_ticks()[-1].stamp_ns >= end_ns, "the first window's end", stand.daemon, _RETURN_S)
        return problems + self._calm(killed_ns, first)

    def _newest_run(self) -> str:
        ticks = self._stand.ticks(self._last_id) or self._stand.ticks(self._last_id - 1)
        return ticks[-1].run

    def _engine_back(self, killed_ns: int) -> list[tuple[str, str]]:
        """Wait until the next engine has been seen for a window; what was wrong in it."""
        stand = self._stand
        returned_ns = stand.await_engine()
        self._outages.append((killed_ns, returned_ns))
        reading = stand.stats()
        if reading is None:
            return [(DIED, "the engine went away again")]
        instance = reading.instance
        problems: list[tuple[str, str]] = []

        def seen() -> list[Tick]:
            return [tick for tick in stand.ticks(self._last_id) if knows(tick, instance)]

        stand.wait(lambda: bool(seen()), "a tick that knows the next engine", stand.daemon, _RETURN_S)
        first = seen()[0]
        # One may have been under way, waiting for an answer, when the engine came back; the next one has to know.
        unknowing = sum(returned_ns < tick.stamp_ns < first.stamp_ns for tick in stand.ticks(self._last_id))
        self._known_ticks.append(max(1, unknowing))
        self._known_s = max(self._known_s, (first.stamp_ns - returned_ns) / 1e9)
        if unknowing > 1:
            problems.append((UNKNOWN, f"{unknowing} ticks after the return of the engine did not know of it"))
        problems += [(UNKNOWN, line) for line in state_seen(first, stand.control.tunables())]
        if not any(tick.body.get("health") == "gone" for tick in stand.ticks(self._last_id)):
            problems.append((UNKNOWN, "no tick said that the engine was gone"))
        end_ns = first.stamp_ns + round(_TIMING.window_s * 1e9)
        stand.wait(lambda: seen()[-1].stamp_ns >= end_ns, "the first window's end", stand.daemon, _RETURN_S)
        return problems + self._calm(killed_ns, first)

    def _calm(self, killed_ns: int, first: Tick) -> list[tuple[str, str]]:
        return [(BURST, line) for line in calm(self._tap.writes, killed_ns, first.stamp_ns + _TIMING.calm_ns)]

    def _violation(self, index: int, what: str, line: str) -> None:
        self._found[what] += 1
        row = {"kill": index, "what": what, "seen": line}
        self._violations.append(row)
        with (self._stand.stack.folder / "violations.jsonl").open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")
