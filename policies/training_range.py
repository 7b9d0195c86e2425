"""Whether an observation is like those of training: per feature, how far outside the range that was seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from envs.features import FEATURES
from envs.spaces import vector_names
from policies.card import Range

MARGIN: Final = 0.1  # of a feature's whole encoded range, beyond what training saw
_NUMBER: Final = len(FEATURES)
_END: Final = len(vector_names())  # of the observation itself; what is advised may stand behind it
_UNKNOWN: Final = slice(_END - _NUMBER, _END)


class TrainingRange:
    """Judges vectors by the ranges of a card."""

    def __init__(self, ranges: Sequence[Range], margin: float = MARGIN) -> None:
        seen = np.array([row.low is not None for row in ranges])
        self._margin, self._never_known = margin, ~seen
        self._never_unknown = np.array([not row.unknown for row in ranges]) & seen
        self._low = np.array([0.0 if row.low is None else row.low for row in ranges]) - margin
        self._high = np.array([1.0 if row.high is None else row.high for row in ranges]) + margin

    def as_trained(self, vector: NDArray[np.float32]) -> NDArray[np.float32]:
        """``vector`` with features that training never knew set to unknown, as the network has always seen them.

        A simulator has no figure for some of what a live engine tells; that is no reason to give up.
        """
        result = vector.copy()
        result[:_NUMBER][self._never_known] = 0.0
        result[_UNKNOWN][self._never_known] = 1.0
        return result

    def objection(self, vector: NDArray[np.float32]) -> str | None:
        """Which feature is furthest out and how far, in one line; None when all is as in training."""
        features, unknown = vector[:_NUMBER], vector[_UNKNOWN] > 0.5
        lost = np.flatnonzero(unknown & self._never_unknown)
        if lost.size:
            return f"{FEATURES[lost[0]].name} is unknown, which it never was in training"
        beyond = np.maximum(self._low - features, features - self._high)
        beyond[unknown | self._never_known] = 0.0
        worst = int(np.argmax(beyond))
        if beyond[worst] <= 0:
            return None
        outside = 100 * (beyond[worst] + self._margin)
        return (
            f"{FEATURES[worst].name} is {outside:.0f} % of its scale outside the range of training "
            f"({100 * self._margin:.0f} % are allowed)"
        )


class RangeRecorder:
    """Collects the ranges of training from vectors."""

    def __init__(self) -> None:
        self.low = np.full(_NUMBER, np.inf)
        self.high = np.full(_NUMBER, -np.inf)
        self.unknown = np.zeros(_NUMBER, dtype=bool)

    def add(self, vectors: NDArray[np.float32]) -> None:
        """``vectors``: float32 [rows, entries], not normalised."""
        features, unknown = vectors[:, :_NUMBER].astype(np.float64), vectors[:, _UNKNOWN] > 0.5
        self.low = np.minimum(self.low, np.where(unknown, np.inf, features).min(axis=0))
        self.high = np.maximum(self.high, np.where(unknown, -np.inf, features).max(axis=0))
        self.unknown |= unknown.any(axis=0)

    def ranges(self) -> list[Range]:
        return [
            Range(low=float(low), high=float(high), unknown=bool(unknown))
            if low <= high
            else Range(low=None, high=None, unknown=bool(unknown))
            for low, high, unknown in zip(self.low, self.high, self.unknown, strict=True)
        ]
