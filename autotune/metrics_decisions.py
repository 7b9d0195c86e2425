"""Proposals, counted under bounded labels: knobs and values from the declarations, verdicts from the guard, writers
from a fixed list; beyond a limit decisions count as "other".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter

from engine.tunables import Tunable

WRITERS: Final = ("autotune", "operator", "startup", "other")
_MOST_VALUES: Final = 32  # of a knob with more, all are "other"
# So many kinds of decisions are told apart; of further ones only knob, writer and verdict, and in the end nothing.
_MAX_KINDS: Final = 56
_MAX_SERIES: Final = 70


class DecisionCounter:
    """Registers ``autotune_decisions``, which counts through :meth:`count`."""

    def __init__(self, registry: CollectorRegistry, tunables: Mapping[str, Tunable]) -> None:
        self._tunables = tunables
        self._seen: set[tuple[str, ...]] = set()
        self._decisions = Counter(
            "autotune_decisions",
            "Proposals, by what was to change, why, who wanted it and what became of it.",
            ["knob", "to", "scenario", "writer", "verdict"],
            registry=registry,
        )

    def count(self, knob: str, to: object, scenario: str, writer: str, verdict: str) -> None:
        """Count one proposal; labels outside the declared ones become "other", as do those of a kind too many."""
        tunable = self._tunables.get(knob)
        is_declared = tunable is not None and to in tunable.values and len(tunable.values) <= _MOST_VALUES
        value = str(to) if is_declared else "other"
        known, who = "other" if tunable is None else knob, writer_class(writer)
        labels = self._bounded((known, value, scenario, who, verdict), (known, "other", "other", who, verdict))
        self._decisions.labels(*labels).inc()

    def _bounded(self, whole: tuple[str, ...], folded: tuple[str, ...]) -> tuple[str, ...]:
        for labels, most in ((whole, _MAX_KINDS), (folded, _MAX_SERIES)):
            if labels in self._seen or len(self._seen) < most:
                self._seen.add(labels)
                return labels
        return ("other",) * len(whole)


def writer_class(writer: str) -> str:
    """The bounded label of a writer's name: ``operator:anna`` is ``operator``."""
    kind = writer.partition(":")[0]
    return kind if kind in WRITERS else "other"
