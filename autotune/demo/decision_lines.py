"""Decisions for people who watch the load: when, from what to what, what became of it, why; repeats are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from autotune.decisions import DecisionRecord, move_of, said
from autotune.demo.watch import ANSWERED
from autotune.writers import OWN_WRITER, who_of
from engine.text import one_line

EXPLAINED = (
    "in decisions, kv_demand is the KV of all running and waiting requests, if it were stored in native, over the "
    "pool: above 1 it does not fit"
)


class DecisionLines:
    """Tells each decision as a line. ``began_wall_s``: when the load began, wall time; None until it has."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.began_wall_s: float | None = None
        self._say = say
        self._refused: Counter[tuple[str, str]] = Counter()

    def show(self, record: DecisionRecord) -> None:
        """Say a decision; a refusal that was told already is only counted."""
        if record.verdict not in ANSWERED:
            kind = (f"{record.knob} -> {record.new}", record.verdict)
            self._refused[kind] += 1
            if self._refused[kind] > 1:
                return
        self._say(f"{self._when(record):>8}: {decision_text(record)}")

    def end(self) -> None:
        """Say how often the guard held back what was shown once."""
        for (what, verdict), number in self._refused.items():
            if number > 1:
                self._say(f"  {what} was held back by the guard {number} times in all ({verdict})")

    def _when(self, record: DecisionRecord) -> str:
        if self.began_wall_s is None or record.wall_s < self.began_wall_s:
            return "  before the load"
        return f"{record.wall_s - self.began_wall_s:6.1f} s"


def decision_text(record: DecisionRecord) -> str:
    """One line without its time."""
    move = move_of(record.knob, record.old, record.new)
    by = "" if record.writer == OWN_WRITER else f", by {who_of(record.writer)}"
    about = f"(tick {record.tick}, {record.scenario}{by})"
    if record.verdict in ANSWERED:
        # What the engine has to say of a change that it did not take.
        why = f": {record.why}" if record.why and record.verdict in {"rejected", "conflict"} else ""
        return one_line(
            f"{move} {record.verdict}{why} {about}: {said(record.scenario, record.reason, record.why, move)}", 1000
        )
    verdict = f"{record.verdict}: {record.why}" if record.why else record.verdict
    wanted = said(record.scenario, record.reason, "", move)
    return one_line(f"{move} held back by the guard ({verdict}) {about}{f': {wanted}' if wanted else ''}", 1000)
