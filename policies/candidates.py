"""Settings one or two moves away from the one in force, as rows of places. numpy only."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import combinations
from typing import Final

import numpy as np

from engine.tunables import TUNABLES
from envs.port import Change
from policies.effects import KNOBS, Places

_EVICTION: Final = KNOBS.index("eviction")
_KEEP: Final = KNOBS.index("keep_tokens")


class Candidates:
    """All settings that differ in one or two of the predicted knobs from any given one. The moves are listed once."""

    def __init__(self) -> None:
        places = [range(len(TUNABLES[knob].values)) for knob in KNOBS]
        single = [(one, place, one, place) for one in range(len(KNOBS)) for place in places[one]]
        double = [
            (one, first, two, second)
            for one, two in combinations(range(len(KNOBS)), 2)
            for first in places[one]
            for second in places[two]
        ]
        self._one, self._first, self._two, self._second = np.array(single + double).T

    def rows(self, now: Sequence[int], movable: Collection[str]) -> Places:
        """int64 [settings, knobs], each different: the setting in force first, then single moves, then pairs of them.

        Only ``movable`` knobs move. How much eviction keeps stays as it is where nothing is evicted.
        """
        here, free = np.array(now), np.array([knob in movable for knob in KNOBS])
        one, two = self._one, self._two
        fine = free[one] & free[two] & (self._first != here[one]) & (self._second != here[two])
        at = np.flatnonzero(fine)
        rows = np.empty((1 + len(at), len(KNOBS)), np.int64)
        rows[:] = here
        nth = np.arange(1, len(rows))
        rows[nth, one[at]] = self._first[at]
        rows[nth, two[at]] = self._second[at]
        matters = (rows[:, _EVICTION] > 0) | (rows[:, _KEEP] == here[_KEEP])
        chosen: Places = rows[matters]
        return chosen


def changes(now: Sequence[int], row: Sequence[int] | Places) -> list[Change]:
    """The moves from one setting to another, in the order of the knobs."""
    return [
        Change(knob, TUNABLES[knob].values[place])
        for knob, here, place in zip(KNOBS, now, (int(place) for place in row), strict=True)
        if here != place
    ]
