"""Where restarts are decided, beside the loop: it watches, weighs, asks for permission, and sees one through.

Permission is the configuration's (``restart.allowed``) and the mode's (``active``): without both there is advice and
nothing else. What it knows outlives the daemon, in the journal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypedDict

from autotune.adapters.base import RestartableEngine
from autotune.adapters.looks import look_of, settings_of
from autotune.adapters.restart import Restarter
from autotune.adapters.restart_file import FileRefused, read_own
from autotune.adapters.restart_work import Outcome, Phase, Work
from autotune.adapters.worth import worth_text
from autotune.decisions import DecisionRecord
from autotune.writers import OWN_WRITER
from engine.clock import Clock
from engine.shapes import fits
from engine.stats import EngineStats
from engine.text import one_line, rough_time
from engine.tunables import TunableValue
from envs.signals import Targets
from envs.window import StatsWindow
from policies.restart_advice import Advice, Terms, advise
from policies.restart_looks import Look

KEY: Final = "restart"
_BARRED_S: Final = 86_400.0  # what was taken back is not tried again for so long


class _Kept(TypedDict):
    """What the journal must hold for :meth:`RestartDesk.restore`."""

    tried_wall_s: float | None
    took_s: float | None
    barred: dict[str, float]
    work: dict[str, Any] | None


@dataclass(frozen=True)
class Rules:
    """What the operator has laid down. ``is_allowed``: restarts are permitted at all. ``watch_s``: what is weighed."""

    is_allowed: bool
    min_interval_s: float
    watch_s: float
    terms: Terms
    targets: Targets


@dataclass
class Note:
    """What a tick came to: ``records`` to be shown, ``body`` for the journal, ``keep`` for :meth:`RestartDesk.restore`
    (None: as before), ``effect`` of an earlier tick.
    """

    body: dict[str, Any]
    records: list[DecisionRecord] = field(default_factory=list)
    keep: dict[str, Any] | None = None
    effect: tuple[int, dict[str, Any]] | None = None


class RestartDesk:
    """``restarter`` is None where the configuration names no file or command: then there is advice only."""

    def __init__(self, engine: RestartableEngine, restarter: Restarter | None, rules: Rules, clock: Clock) -> None:
        self._engine, self._restarter, self._clock = engine, restarter, clock
        self.rules = rules
        self._looks: deque[Look] = deque()
        self._last: EngineStats | None = None
        self._work: Work | None = None
        self._tried_wall_s: float | None = None
        self._took_s: float | None = None  # without service, at the last restart that was seen whole
        self._barred: dict[str, float] = {}  # by change, the wall time until which it is not tried again
        self._shown = ""
        self.advice: Advice | None = None

    def restore(self, kept: Any) -> None:
        """Go on where an earlier daemon stopped; anything unusable is forgotten."""
        if not fits(kept, _Kept):
            return
        self._tried_wall_s, self._took_s, self._barred = kept["tried_wall_s"], kept["took_s"], dict(kept["barred"])
        if kept["work"] is None or self._restarter is None:
            return
        try:
            work = Work.resumed(kept["work"], self._clock.now_ns())
            for knob, value in work.changes:
                self._engine.tunables[knob].parse(value)
        except (KeyError, TypeError, ValueError):
            return
        if not self._has_touched_nothing(kept["work"]):
            self._work = work

    def _has_touched_nothing(self, work: dict[str, Any]) -> bool:
        """Whether an earlier daemon ended before it wrote the file; it may have been killed between any two steps."""
        if self._restarter is None or work["phase"] != Phase.RESTARTING:
            return False
        try:
            return bool(read_own(self._restarter.plan.file) == work["file_before"])
        except FileRefused:
            return False

    def tick(self, tick: int, reading: EngineStats | None, window: Callable[[], StatsWindow], *, mode: str) -> Note:
        """``reading``: the engine's newest, None when it does not answer. ``window``: the one that tails are of."""
        before = self._memory()
        if self._work is not None and self._restarter is not None:
            told = self._go_on(self._work, self._restarter, mode)
        else:
            told = self._weigh(tick, reading, window, mode)
        now = self._memory()
        told.keep = None if now == before else now
        return told

    def status(self) -> dict[str, Any]:
        """For people: what is allowed, advised and under way."""
        return {
            "allowed": self.rules.is_allowed and self._restarter is not None,
            "advice": None if self.advice is None else self.advice.to_json(),
            "under_way": None if self._work is None else str(self._work.phase),
            "next_in_s": self._too_soon_s(),
        }

    def _weigh(self, tick: int, reading: EngineStats | None, window: Callable[[], StatsWindow], mode: str) -> Note:
        if reading is None:
            self._last = None
            return Note({"scenario": "engine-away"})
        self._look(reading, window())
        self.advice = advice = advise(list(self._looks), settings_of(self._engine, reading.effective), self._terms())
        told = Note({"scenario": advice.scenario})
        if not advice.changes:
            self._shown = ""
            return told
        verdict, why = self._verdict(advice, mode)
        if verdict == "draining" and self._restarter is not None:
            verdict, why = self._begin(self._restarter, advice, reading, tick)
        shown = f"{verdict} {advice.changes}"
        if shown != self._shown:
            self._shown = shown
            told.records = self._records(tick, advice, reading, verdict, why)
            told.body["advice"] = advice.to_json()
        told.body["verdict"] = [verdict, why]
        return told

    def _verdict(self, advice: Advice, mode: str) -> tuple[str, str]:
        """Whether to do it, and why not."""
        if self._restarter is None or not self.rules.is_allowed:
            return "advised", "restarts are not permitted (restart.allowed); nothing was touched"
        if mode != "active":
            return ("advised" if mode == "advise" else "off"), f"mode is {mode}: nothing was touched"
        if not advice.is_worth:
            return "not_worth", f"it would not earn what it costs within {rough_time(self.rules.terms.payback_s)}"
        wait_s = self._too_soon_s()
        if wait_s > 0:
            return "rate_limit", f"the last restart is too recent (restart.min_interval_s); in {rough_time(wait_s)}"
        until = self._barred.get(_name(advice))
        if until is not None and self._clock.wall_s() < until:
            return "failed_before", "it was taken back the last time"
        return "draining", "the engine is drained first"

    def _begin(self, restarter: Restarter, advice: Advice, reading: EngineStats, tick: int) -> tuple[str, str]:
        try:
            self._work = restarter.begin(advice.changes, reading.effective, tick, self._clock.now_ns())
        except (FileRefused, ValueError) as error:
            return "refused", one_line(error)
        self._tried_wall_s = self._clock.wall_s()
        how = "by its own pause" if self._work.is_paused else "it is waited for to be idle"
        return "draining", f"the engine is drained first: {how}, {restarter.plan.drain_s:g} s at most"

    def _go_on(self, work: Work, restarter: Restarter, mode: str) -> Note:
        self._last = None
        self._looks.clear()  # what comes after is another engine's
        result: Work | Outcome | None = None
        if mode != "active" or not self.rules.is_allowed:
            result = restarter.abandon(work, "the permission was taken back; nothing was touched")
        if result is None:
            result = restarter.advance(work, self._clock.now_ns())
        if isinstance(result, Work):
            self._work = result
            return Note({"phase": str(result.phase), "changes": result.to_json()["changes"]})
        self._work = None
        if result.kind == "applied" and result.without_service_s is not None:
            self._took_s = result.without_service_s
        if result.kind in {"rolled_back", "failed"}:
            self._barred[_joined(work.changes)] = self._clock.wall_s() + _BARRED_S
        effect = {"outcome": result.kind, "why": result.why, "without_service_s": result.without_service_s}
        effect["lost_requests"] = result.held
        told = Note({"outcome": result.kind, "why": result.why}, effect=(work.tick, effect))
        seconds = "" if result.without_service_s is None else f"; {result.without_service_s:.1f} s without service"
        held = f", {result.held:.0f} held requests lost" if result.held else ""
        told.records = [
            self._record(work.tick, knob, work.before.get(knob), value, result.kind, f"{result.why}{seconds}{held}", "")
            for knob, value in work.changes
        ]
        return told

    def _look(self, reading: EngineStats, short: StatsWindow) -> None:
        interval = StatsWindow.between(self._last, reading)
        was_over = bool(self._looks and self._looks[-1].is_over)
        look = look_of(interval, short, self.rules.targets, was_over=was_over)
        self._last = reading
        if look is None:
            return
        self._looks.append(look)
        watched_s = sum(one.seconds for one in self._looks)
        while self._looks and watched_s - self._looks[0].seconds >= self.rules.watch_s:
            watched_s -= self._looks.popleft().seconds

    def _terms(self) -> Terms:
        if self._took_s is None:
            return self.rules.terms
        return replace(self.rules.terms, restart_s=self._took_s, is_restart_measured=True)

    def _too_soon_s(self) -> float:
        """Seconds until another restart may begin."""
        if self._tried_wall_s is None:
            return 0.0
        passed_s = self._clock.wall_s() - self._tried_wall_s
        # A clock that was set back must not allow one early.
        return max(0.0, self.rules.min_interval_s - max(0.0, passed_s))

    def _records(self, tick: int, advice: Advice, reading: EngineStats, verdict: str, why: str) -> list[DecisionRecord]:
        reason = f"{advice.reason}; {worth_text(advice)}"
        return [
            self._record(tick, change.knob, reading.effective.get(change.knob), change.value, verdict, why, reason)
            for change in advice.changes
        ]

    def _record(
        self, tick: int, knob: str, old: TunableValue | None, new: TunableValue, verdict: str, why: str, reason: str
    ) -> DecisionRecord:
        wall_s = self._clock.wall_s()
        return DecisionRecord(tick, wall_s, knob, old, new, "restart", reason, OWN_WRITER, verdict, why)

    def _memory(self) -> dict[str, Any]:
        return {
            "work": None if self._work is None else self._work.to_json(),
            "tried_wall_s": self._tried_wall_s,
            "took_s": self._took_s,
            "barred": dict(self._barred),
        }


def _name(advice: Advice) -> str:
    return _joined(tuple((change.knob, change.value) for change in advice.changes))


def _joined(changes: tuple[tuple[str, TunableValue], ...]) -> str:
    return " ".join(f"{knob}={value}" for knob, value in changes)
