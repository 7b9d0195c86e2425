"""How long a step takes: a sum of named, physical terms with coefficients >= 0. numpy only.

Times are exact: coefficients are kept in whole femtoseconds, counts are integers, so a step's time in nanoseconds is
the same on every machine, whether it is evaluated alone or with thousands of others.

What is counted is declared in :mod:`engine.step_counts`; here each count has a price.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine.step_counts import RECODE_NAMES, STEP_NAMES

FS_PER_NS: Final = 10**6
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class LatencyModel:
    """Seconds per unit of every term, by name (a term left out costs nothing), and where the knee lies in tokens.

    Raises ValueError for an unknown term or a coefficient that is negative or not finite.
    """

    seconds: Mapping[str, float]
    knee_tokens: int = 1
    step_fs: tuple[int, ...] = field(init=False, repr=False)
    recode_fs: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        known = {*STEP_NAMES, *RECODE_NAMES}
        for name, value in self.seconds.items():
            if name not in known:
                raise ValueError(f"unknown latency term {name!r}; known: {', '.join(sorted(known))}")
            if not (math.isfinite(value) and 0 <= value < 1e3):
                raise ValueError(f"latency term {name}: expected seconds >= 0, got {value}")
        if self.knee_tokens < 1:
            raise ValueError(f"the knee lies at 1 token or more, got {self.knee_tokens}")
        object.__setattr__(self, "step_fs", _femtoseconds(self.seconds, STEP_NAMES))
        object.__setattr__(self, "recode_fs", _femtoseconds(self.seconds, RECODE_NAMES))

    def step_ns(self, counts: Sequence[int]) -> int:
        """Time of one step in nanoseconds, recoding apart; ``counts`` in the order of ``STEP_TERMS``."""
        total = 0
        for count, price in zip(counts, self.step_fs, strict=True):
            if count and price:
                total += count * price
        return total // FS_PER_NS

    def steps_ns(self, counts: Ints) -> Ints:
        """The same for many steps: int64 [steps, terms] to int64 [steps]. Exactly what :meth:`step_ns` gives for each.

        A step of more than two hours would overflow.
        """
        times: Ints = counts @ np.array(self.step_fs, np.int64) // FS_PER_NS
        return times

    def recode_ns(self, counts: Sequence[int]) -> int:
        """Time of a step's recoding in nanoseconds; ``counts`` in the order of ``RECODE_TERMS``."""
        return sum(count * price for count, price in zip(counts, self.recode_fs, strict=True)) // FS_PER_NS

    def scaled(self, factor: float, *, only: Sequence[str] | None = None) -> LatencyModel:
        """A model whose terms (all, or those named) cost ``factor`` times as much."""
        chosen = set(only if only is not None else self.seconds)
        seconds = {name: value * (factor if name in chosen else 1.0) for name, value in self.seconds.items()}
        return LatencyModel(seconds, self.knee_tokens)


def _femtoseconds(seconds: Mapping[str, float], names: Sequence[str]) -> tuple[int, ...]:
    return tuple(round(seconds.get(name, 0.0) * 1e15) for name in names)
