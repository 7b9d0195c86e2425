"""Desired and effective tunables, their revision, and who wrote each knob. No torch, no threads.

The rules of ``PATCH /v1/tunables`` live here: a change is checked whole before anything is done, so it is taken
whole or not at all, and repeating it changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from engine.tunables import TUNABLES, TunableValue, TunableValues, parse_change

Veto = Callable[[str, TunableValue], str | None]  # why a knob may not take an allowed value, or None

APPLIED, CONVERGING, REJECTED, CONFLICT = "applied", "converging", "rejected", "conflict"


@dataclass(frozen=True)
class Patch:
    """A wish to change knobs. ``if_revision`` None writes over whatever is there."""

    changes: Mapping[str, object]
    writer: str
    reason: str = ""
    if_revision: int | None = None


@dataclass(frozen=True)
class KnobOutcome:
    """``applied | converging | rejected | conflict``, and why in one line."""

    status: str
    why: str = ""


@dataclass(frozen=True)
class PatchOutcome:
    """Revision after the patch and one outcome per knob that it named."""

    revision: int
    results: dict[str, KnobOutcome] = field(default_factory=dict)

    @property
    def http_status(self) -> int:
        """200, 409 for a revision that has moved on, 422 for a refused change."""
        statuses = {outcome.status for outcome in self.results.values()}
        return 409 if CONFLICT in statuses else 422 if REJECTED in statuses else 200

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class WriterRecord:
    """Who set a knob to its present value, why, at which revision, and when (monotonic nanoseconds)."""

    writer: str
    reason: str
    revision: int
    stamp_ns: int


class TunableState:
    """Values and their history of one step. ``desired`` is what was asked, ``effective`` what new work gets."""

    def __init__(self, values: TunableValues, stamp_ns: int, veto: Veto | None = None) -> None:
        """``veto`` judges what patches ask for; values at start are the caller's business.

        Raises ValueError for a missing or unknown knob or a value that is not offered.
        """
        missing = set(TUNABLES) - set(values)
        if missing:
            raise ValueError(f"tunables without a value: {', '.join(sorted(missing))}")
        self.desired: TunableValues = {name: parse_change(name, value) for name, value in values.items()}
        self.effective: TunableValues = dict(self.desired)
        self.revision = 0
        first = WriterRecord("startup", "value at start", 0, stamp_ns)
        self._veto = veto
        self.writers: dict[str, WriterRecord] = dict.fromkeys(self.desired, first)

    def refusal(self, patch: Patch) -> PatchOutcome | None:
        """The answer to a patch that may not be taken, or None. Changes nothing."""
        if patch.if_revision is not None and patch.if_revision != self.revision:
            why = f"the revision is {self.revision} by now, not {patch.if_revision}; look again before a change"
            return PatchOutcome(self.revision, {name: KnobOutcome(CONFLICT, why) for name in patch.changes})
        bad: dict[str, KnobOutcome] = {}
        for name, value in patch.changes.items():
            try:
                parsed = parse_change(name, value)
            except ValueError as error:
                bad[name] = KnobOutcome(REJECTED, str(error))
                continue
            objection = self._veto(name, parsed) if self._veto is not None else None
            if objection is not None:
                bad[name] = KnobOutcome(REJECTED, objection)
        return self.rejected(patch, bad) if bad else None

    def rejected(self, patch: Patch, bad: Mapping[str, KnobOutcome]) -> PatchOutcome:
        """All knobs of ``patch`` refused: the bad ones for their own reason, the others because of them."""
        other = KnobOutcome(REJECTED, f"not applied: {', '.join(bad)} in the same request was rejected")
        return PatchOutcome(self.revision, {name: bad.get(name, other) for name in patch.changes})

    def changed_values(self, patch: Patch) -> TunableValues:
        """The knobs that would get another value; ``patch`` must not be refused."""
        parsed = {name: parse_change(name, value) for name, value in patch.changes.items()}
        return {name: value for name, value in parsed.items() if value != self.desired[name]}

    def commit(self, patch: Patch, stamp_ns: int) -> None:
        """Take the patch. The revision moves when a value or the writer of a knob does: an operator who asks for the
        value that the daemon had already set owns the knob from then on.
        """
        parsed = {name: parse_change(name, value) for name, value in patch.changes.items()}
        touched = [
            name
            for name, value in parsed.items()
            if value != self.desired[name] or self.writers[name].writer != patch.writer
        ]
        if not touched:
            return
        self.revision += 1
        record = WriterRecord(patch.writer, patch.reason, self.revision, stamp_ns)
        for name in touched:
            self.desired[name] = self.effective[name] = parsed[name]
            self.writers[name] = record
