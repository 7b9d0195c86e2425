"""One change by a restart, from drained to verified or taken back: a state machine that a tick moves on.

Nothing here waits: an engine takes minutes to start, and the loop has a watchdog. The state is JSON, kept in the
journal at every step, so that a daemon that was killed in between goes on: it looks whether the engine is there with
what was wanted, and takes back what is not.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from autotune.adapters.base import RestartableEngine
from autotune.adapters.restart_file import FileRefused, put, read_own, render, values_in
from autotune.adapters.restart_work import Outcome, Phase, RestartPlan, Work
from engine.control_client import EngineUnreachable
from engine.text import one_line
from engine.tunables import TunableValue
from envs.port import Change

_SETTLE_S: Final = 10.0  # healthy for so long with another value: it did not take effect
_FILE: Final = -1  # before the first command: the file


class Running(Protocol):
    """What is used of :class:`subprocess.Popen`."""

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...


Spawn = Callable[[Sequence[str]], Running]


def spawn(command: Sequence[str]) -> Running:
    """Start a command of the operator's; no shell reads it, and what it says goes where the daemon's log goes.

    Raises OSError.
    """
    return subprocess.Popen(command, stdin=subprocess.DEVNULL)  # noqa: S603  # the configuration's own words


@dataclass
class Restarter:
    """Carries one :class:`Work` at a time out. ``spawn`` starts a command. Not thread-safe: the loop owns it."""

    engine: RestartableEngine
    plan: RestartPlan
    spawn: Spawn = spawn
    _running: Running | None = field(default=None, init=False)
    _next: int = field(default=_FILE, init=False)

    def begin(self, changes: Sequence[Change], before: Mapping[str, TunableValue], tick: int, now_ns: int) -> Work:
        """Begin to drain. Nothing is written and nothing started yet. Raises FileRefused, or ValueError for changes
        that this engine's start cannot be told.
        """
        self.engine.arguments({change.knob: change.value for change in changes})
        file_before = read_own(self.plan.file)
        is_paused = self.plan.drain == "pause" and self.engine.pause()
        wanted = tuple((change.knob, change.value) for change in changes)
        return Work(tick, wanted, dict(before), Phase.DRAINING, now_ns, file_before, is_paused)

    def advance(self, work: Work, now_ns: int) -> Work | Outcome:
        """One step. Asks the engine itself: of one that is restarted, the newest figures count."""
        if work.phase is Phase.DRAINING:
            return self._drain(work, now_ns)
        if work.phase in {Phase.RESTARTING, Phase.RESTORING}:
            return self._run(work, now_ns)
        return self._await(work, now_ns)

    def abandon(self, work: Work, why: str) -> Outcome | None:
        """Give a restart up that has touched nothing yet; None for one that has, which is brought to its end."""
        if work.phase is not Phase.DRAINING:
            return None
        if work.is_paused:
            self.engine.resume()
        return Outcome("not_drained", why)

    def _drain(self, work: Work, now_ns: int) -> Work | Outcome:
        found = self._in_hand()
        if found is None:
            return self._gave_up(work, "the engine went away, or does not tell what it has in hand")
        running, waiting = found
        if running == 0 and (waiting == 0 or work.is_paused):
            # Only noted: the file is written once the journal knows that it may be.
            self._running, self._next = None, _FILE
            return replace(work, phase=Phase.RESTARTING)
        if self._passed_s(work, now_ns) > self.plan.drain_s:
            return self._gave_up(work, f"{running} running and {waiting} waiting after {self.plan.drain_s:g} s")
        return work

    def _in_hand(self) -> tuple[int, int] | None:
        """Running and waiting requests of every engine behind the address; None where that is not known."""
        try:
            gauges = [reading.gauges for reading in self.engine.read().values()]
        except EngineUnreachable:
            return None
        running, waiting = [one.running for one in gauges], [one.waiting for one in gauges]
        return None if None in (*running, *waiting) else (sum(running), sum(waiting))

    def _gave_up(self, work: Work, why: str) -> Outcome:
        if work.is_paused:
            self.engine.resume()
        return Outcome("not_drained", f"{why}; nothing was touched")

    def _write(self, work: Work) -> str:
        """Have the file say what it should in this phase; why not, if it cannot."""
        values = {**values_in(work.file_before), **dict(work.changes)}
        known = {knob: value for knob, value in values.items() if knob in self.engine.tunables}
        try:
            if work.phase is Phase.RESTORING:
                put(self.plan.file, work.file_before)
            else:
                put(self.plan.file, render(self.plan.form, self.engine.arguments(known), known))
        except (FileRefused, ValueError) as error:
            return one_line(error)
        return ""

    def _run(self, work: Work, now_ns: int) -> Work | Outcome:
        """Write the file, then run the commands, one at a time."""
        if self._next == _FILE:
            if work.phase is Phase.RESTARTING:
                found = self._in_hand()
                if found is None or found[0] or (found[1] and not work.is_paused):
                    return replace(work, phase=Phase.DRAINING)  # somebody came in the meantime
                work = replace(work, held=float(found[1]))
            problem = self._write(work)
            if problem and work.phase is Phase.RESTORING:
                return Outcome("failed", f"{work.why}; and the file cannot be taken back: {problem}", None, work.held)
            if problem:
                if work.is_paused:
                    self.engine.resume()
                return Outcome("refused", f"{problem}; nothing was restarted")
            self._next = 0
            work = replace(work, since_ns=now_ns)
            if work.phase is Phase.RESTORING and self._shows(work, work.phase) is True:
                if work.is_paused:
                    self.engine.resume()
                return self._ended(work, now_ns)  # as before, without a second restart
        code = None if self._running is None else self._running.poll()
        if self._running is not None and code is None:
            if self._passed_s(work, now_ns) <= self.plan.ready_s:
                return work
            self._running.kill()
            return self._failed(work, f"{self._command_text()} did not end within {self.plan.ready_s:g} s", now_ns)
        if code:
            return self._failed(work, f"{self._command_text()} ended with {code}", now_ns)
        if self._running is not None:
            self._running, self._next = None, self._next + 1
        if self._next < len(self.plan.commands):
            try:
                self._running = self.spawn(self.plan.commands[self._next])
            except OSError as error:
                return self._failed(work, f"{self._command_text()}: {error.strerror or error}", now_ns)
            return replace(work, stopped_ns=work.stopped_ns or now_ns, up_ns=None)
        self.engine.forget()
        phase = Phase.STARTING if work.phase is Phase.RESTARTING else Phase.RETURNING
        return replace(work, phase=phase, since_ns=now_ns)

    def _await(self, work: Work, now_ns: int) -> Work | Outcome:
        found = self._shows(work, work.phase)
        if found is True:
            return self._ended(work, now_ns)
        if self._passed_s(work, now_ns) > self.plan.ready_s:
            return self._failed(work, f"{found or 'not healthy'} {self.plan.ready_s:g} s after the restart", now_ns)
        if not found:
            return replace(work, up_ns=None)
        self.engine.forget()  # it may have been asked while the one before still answered
        up_ns = now_ns if work.up_ns is None else work.up_ns
        work = replace(work, up_ns=up_ns)
        return self._failed(work, f"it came back {found}", now_ns) if now_ns - up_ns > _SETTLE_S * 1e9 else work

    def _shows(self, work: Work, phase: Phase) -> str | bool:
        """True if the engine is healthy with the values that it should have in this phase; else what it shows, empty
        while it is not healthy.
        """
        wanted = dict(work.changes)
        if phase in {Phase.RESTORING, Phase.RETURNING}:
            wanted = {knob: work.before[knob] for knob in wanted}
        effective = self._effective()
        if effective is None or not self.engine.healthy():
            return ""
        found = {knob: effective.get(knob, "unknown") for knob in wanted}
        return True if found == wanted else "with " + ", ".join(f"{knob}={value}" for knob, value in found.items())

    def _effective(self) -> Mapping[str, TunableValue] | None:
        """The knobs in force, None while the engine does not answer."""
        try:
            readings = self.engine.read()
        except EngineUnreachable:
            return None
        return next(iter(readings.values())).effective

    def _ended(self, work: Work, now_ns: int) -> Outcome:
        took_s = None if work.stopped_ns is None else ((work.up_ns or now_ns) - work.stopped_ns) / 1e9
        if work.phase in {Phase.RESTORING, Phase.RETURNING}:
            return Outcome("rolled_back", f"{work.why}; it runs again as before", took_s, work.held)
        return Outcome("applied", "verified: the engine shows it", took_s, work.held)

    def _failed(self, work: Work, why: str, now_ns: int) -> Work | Outcome:
        """Take the file back, and restart once more if it is not as before; a second failure is for people."""
        why = one_line(why)
        if work.phase in {Phase.RESTORING, Phase.RETURNING}:
            return Outcome("failed", f"{work.why}; and as before it does not come back either: {why}", None, work.held)
        self._running, self._next = None, _FILE
        return replace(work, phase=Phase.RESTORING, since_ns=now_ns, why=why)

    def _command_text(self) -> str:
        return " ".join(self.plan.commands[self._next])

    @staticmethod
    def _passed_s(work: Work, now_ns: int) -> float:
        return (now_ns - work.since_ns) / 1e9
