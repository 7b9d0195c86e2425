"""Scores of an evaluation by contender, workload and seed, and what is read from them before any policy is judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies.evaluation.cells import Score
from policies.evaluation.scenarios import Scenario
from policies.split import Family

NATIVE = "none"
BEST_STATIC = "best-static"
RANDOM_SEARCH = "random-search"
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Table:
    """``rows``: per contender, scores [workload][seed]. ``statics``: names among them that never change anything.

    ``seeds``: how many are compared; a contender with fewer is in ``partial``.
    """

    scenarios: tuple[Scenario, ...]
    rows: Mapping[str, Sequence[Sequence[Score]]]
    statics: tuple[str, ...]
    quality_budget: float

    def values(self, name: str, figure: Callable[[Score], float], only: Sequence[int] | None = None) -> Floats:
        """A figure of every cell: float64 [workloads, seeds]."""
        rows = self.rows[name]
        chosen = range(len(self.scenarios)) if only is None else only
        return np.array([[figure(score) for score in rows[place]] for place in chosen], np.float64)

    def attainment(self, name: str, only: Sequence[int] | None = None) -> Floats:
        """Goodput over what was offered, which makes workloads of different rates comparable."""
        return self.values(name, lambda score: score.attainment, only)

    def throughput(self, name: str, only: Sequence[int] | None = None) -> Floats:
        """Tokens while requests arrived, over native's on the same requests: the objective of batch work."""
        base = self.values(NATIVE, lambda score: score.window_tokens, only)
        return self.values(name, lambda score: score.window_tokens, only) / np.maximum(base, 1.0)

    def objective(self, objective: str) -> Callable[[str, Sequence[int] | None], Floats]:
        return self.throughput if objective == "batch" else self.attainment

    def quality(self, name: str, place: int) -> float:
        """Token-weighted mean loss on a workload."""
        scores = self.rows[name][place]
        tokens = sum(score.tokens for score in scores)
        return sum(score.quality * score.tokens for score in scores) / tokens if tokens else 0.0

    def inside_budget(self, name: str) -> bool:
        """On every workload."""
        return all(self.quality(name, place) <= self.quality_budget for place in range(len(self.scenarios)))

    @property
    def pressured(self) -> list[int]:
        """Workloads that were short of memory under static native, on half of the seeds or more."""
        flags = self.values(NATIVE, lambda score: float(score.pressured))
        return [place for place, row in enumerate(flags) if row.mean() >= 0.5]

    @property
    def relaxed(self) -> list[int]:
        pressed = self.pressured
        return [place for place in range(len(self.scenarios)) if place not in pressed]

    def of_family(self, family: Family) -> list[int]:
        return [place for place, scenario in enumerate(self.scenarios) if scenario.family is family]

    def best_static(self, place: int, objective: str = "interactive") -> str:
        """In hindsight: the static setting with the best mean on a workload among those inside the quality budget."""
        values = self.objective(objective)
        allowed = [name for name in self.statics if self.quality(name, place) <= self.quality_budget] or [NATIVE]
        # A tie goes to the first, which is native: nobody changes a setting for nothing.
        return max(allowed, key=lambda name: float(values(name, [place]).mean()))

    def best_static_values(self, objective: str = "interactive", only: Sequence[int] | None = None) -> Floats:
        """The best static's objective, each workload with its own setting."""
        values = self.objective(objective)
        chosen = range(len(self.scenarios)) if only is None else only
        return np.concatenate([values(self.best_static(place, objective), [place]) for place in chosen])
