"""The only writer: every change that the daemon makes to an engine goes through here, and only here is the mode gated.

Writes name the revision that the decision was based on, so a write by anybody else in between is a conflict and never
overwritten; who wrote each knob last tells an operator's knobs from the daemon's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from autotune.writers import OWN_WRITER, ends_ns, is_the_daemons, who_of
from engine.control_client import EngineUnreachable, PatchAnswer, TunablesView
from engine.stats import EngineStats
from engine.tunables import TunableValue
from envs.port import ApplyResult, ApplyStatus, Change
from policies.guard import Writer


class Control(Protocol):
    """What is used of :class:`engine.control_client.ControlClient`; every method may raise EngineUnreachable."""

    def tunables(self) -> TunablesView: ...

    def stats(self) -> EngineStats: ...

    def patch(
        self, changes: Mapping[str, TunableValue], *, writer: str, reason: str = "", if_revision: int | None = None
    ) -> PatchAnswer: ...


class Actuator:
    """Implements :class:`envs.port.EnginePort`; ``latest`` gives the reading that an environment may see.

    ``mode`` is ``active``, ``advise`` or ``off``; only the first writes. Call :meth:`refresh` at the start of a tick
    and set ``reason`` before the environment acts. Not thread-safe: the control loop owns it.
    """

    def __init__(
        self, control: Control, *, mode: str, latest: Callable[[], EngineStats | None], now_ns: Callable[[], int]
    ) -> None:
        self._control, self._now_ns = control, now_ns
        self._latest = latest
        self.mode = mode
        self.reason = ""
        """Sent with the next write, for whoever asks the engine why."""
        self.last_error = ""
        """Why the engine last could not be reached; empty while it can."""
        self._view: TunablesView | None = None

    def poll(self) -> EngineStats | None:
        """A fresh reading from the engine, None when it does not answer."""
        try:
            reading = self._control.stats()
        except EngineUnreachable as error:
            self.last_error = str(error)
            return None
        self.last_error = ""
        return reading

    def refresh(self) -> TunablesView | None:
        """Read revision, values and writers anew; None when the engine does not answer."""
        try:
            self._view = self._control.tunables()
        except EngineUnreachable as error:
            self.last_error = str(error)
            self._view = None
        return self._view

    def forget(self) -> None:
        """Drop what the last :meth:`refresh` found: nothing is written until the next one."""
        self._view = None

    @property
    def view(self) -> TunablesView | None:
        """What the last :meth:`refresh` found."""
        return self._view

    def writers(self) -> dict[str, Writer]:
        """Who wrote each knob last; one that still has its value from the start, was given back, or whose pin has ended
        is left out.
        """
        if self._view is None:
            return {}
        now_ns = self._now_ns()
        return {
            knob: Writer(who_of(name), record["revision"], record["reason"], ends_ns(name))
            for knob, record in self._view["writers"].items()
            if (name := record["writer"]) == OWN_WRITER or not is_the_daemons(name, now_ns)
        }

    def overrides(self) -> dict[str, Writer]:
        """Knobs that somebody else owns: the daemon leaves them alone until they are released."""
        return {knob: writer for knob, writer in self.writers().items() if writer.writer != OWN_WRITER}

    def read(self) -> EngineStats | None:
        return self._latest()

    def apply(self, change: Change) -> ApplyResult:
        if self.mode != "active":
            return ApplyResult(ApplyStatus.REFUSED, f"mode is {self.mode}: not written")
        if self._view is None:
            return ApplyResult(ApplyStatus.LOST, self.last_error or "the engine's revision is not known")
        overrides = self.overrides()
        if change.knob in overrides:
            return ApplyResult(ApplyStatus.REFUSED, f"{change.knob} was set by {overrides[change.knob].writer}")
        try:
            answer = self._control.patch(
                {change.knob: change.value},
                writer=OWN_WRITER,
                reason=self.reason,
                if_revision=self._view["revision"],
            )
        except EngineUnreachable as error:
            self.last_error = str(error)
            self._view = None
            return ApplyResult(ApplyStatus.LOST, str(error))
        except ValueError as error:
            return ApplyResult(ApplyStatus.REJECTED, str(error))
        return self._outcome(change, answer)

    def write_for(
        self, writer: str, changes: Mapping[str, TunableValue], reason: str, if_revision: int | None = None
    ) -> PatchAnswer:
        """A person's own change, in every mode: the mode gates what the daemon wants, not what people do.

        Raises EngineUnreachable, and ValueError for what the engine finds malformed.
        """
        return self._control.patch(changes, writer=writer, reason=reason, if_revision=if_revision)

    def _outcome(self, change: Change, answer: PatchAnswer) -> ApplyResult:
        result = answer["results"].get(change.knob)
        try:
            status = ApplyStatus(result["status"]) if result is not None else ApplyStatus.REJECTED
        except ValueError:
            status = ApplyStatus.REJECTED
        why = result["why"] if result is not None else "the engine's answer does not mention the knob"
        applied = ApplyResult(status, why, change, answer["revision"])
        if not applied.took_effect:
            return ApplyResult(status, why, None, answer["revision"])
        if self._view is not None:
            self._view["revision"] = answer["revision"]
        return applied
