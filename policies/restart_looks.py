"""What was seen of an engine between two readings, and what a while of it adds up to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from envs.window import ratio

FULL: Final = 0.9  # share of the pool from which on waiting counts as waiting for memory


@dataclass(frozen=True)
class Look:
    """One interval between two readings. ``seconds``: its length. ``usage``: share of the KV pool in use at its end;
    ``slots``: requests that memory is set aside for, where it is so. ``preemptions``: in it. ``is_over``: whether a
    tail was over its target. ``rps``: arrivals. None where the engine does not tell.
    """

    seconds: float
    running: float | None = None
    waiting: float | None = None
    usage: float | None = None
    slots: float | None = None
    preemptions: float | None = None
    is_over: bool | None = None
    rps: float | None = None

    @property
    def share(self) -> float | None:
        """Of what memory holds, in use."""
        return ratio(self.running, self.slots) if self.usage is None else self.usage

    @property
    def demand(self) -> float | None:
        """The same if all that wait ran as well, each holding as much as one that runs; above 1: it does not fit."""
        if self.share is None or self.running is None or self.waiting is None:
            return None
        if not self.running:
            return None if self.waiting else self.share
        return self.share * (self.running + self.waiting) / self.running

    @property
    def is_pressed(self) -> bool:
        """Whether memory was what requests waited for."""
        return bool(self.preemptions) or (bool(self.waiting) and (self.share or 0.0) >= FULL)


@dataclass(frozen=True)
class Evidence:
    """Measured sums over the looks; None where the engine does not tell. ``pressed_s``: see the module."""

    watched_s: float
    over_s: float | None
    pressed_s: float
    preemptions: float | None
    peak_share: float | None
    peak_demand: float | None
    peak_waiting: float | None
    rps: float | None


def evidence_of(looks: Sequence[Look]) -> Evidence:
    """What was seen, summed up."""
    watched_s = sum(look.seconds for look in looks)
    known_over = [look for look in looks if look.is_over is not None]
    preempted = [look.preemptions for look in looks if look.preemptions is not None]
    arrived = [(look.rps * look.seconds, look.seconds) for look in looks if look.rps is not None]
    return Evidence(
        watched_s=watched_s,
        over_s=sum(look.seconds for look in known_over if look.is_over) if known_over else None,
        pressed_s=sum(look.seconds for look in looks if look.is_pressed),
        preemptions=sum(preempted) if preempted else None,
        peak_share=_largest(look.share for look in looks),
        peak_demand=_largest(look.demand for look in looks),
        peak_waiting=_largest(look.waiting for look in looks),
        rps=ratio(sum(count for count, _ in arrived), sum(seconds for _, seconds in arrived)),
    )


def _largest(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return max(known) if known else None
