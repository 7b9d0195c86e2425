"""How much attention each chunk of 16 positions of one sequence has attracted, latest queries first. No torch.

The prompt's last queries (SnapKV's observation window, Li et al. 2024) say what is asked for; decode steps are added as
they come and older ones fade (H2O, Zhang et al. 2023, with a decay in place of its plain sum). Scores rank chunks of
one sequence in one layer group; they are compared with nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

OBSERVED_PROMPT_TOKENS = 16  # queries at the end of a prompt that are observed; more of them blur what is asked for
LEAST_QUERIES = 8  # before any score is trusted (after a switch in the middle of an answer)
DECAY = 0.99  # of a score per query that comes after it
NEIGHBOUR_SHARE = 0.5  # of a chunk's score that its neighbours have at least: what is asked for may straddle chunks

Scores = npt.NDArray[np.float32]


@dataclass(frozen=True)
class ObservedMass:
    """What a step's queries of one sequence attended: per layer group, float32 [chunks], averaged over the queries.

    ``queries``: how many were observed.
    """

    queries: int
    groups: tuple[Scores, ...]


@dataclass(slots=True, eq=False)
class ChunkScores:
    """Scores of one sequence in one group. ``queries``: observed so far; 0 as long as nobody reports any mass."""

    values: Scores = field(default_factory=lambda: np.zeros(0, np.float32))
    queries: int = 0

    def observe(self, mass: Scores, queries: int) -> None:
        """Add the mean mass per query of the next ``queries`` queries; ``mass``: float32 [chunks], may have grown."""
        if len(mass) > len(self.values):
            grown = np.zeros(2 * len(mass), np.float32)
            grown[: len(self.values)] = self.values
            self.values = grown
        self.values *= np.float32(DECAY**queries)
        self.values[: len(mass)] += mass * np.float32(queries)
        self.queries += queries

    @property
    def is_trusted(self) -> bool:
        """Whether enough queries were observed to choose by."""
        return self.queries >= LEAST_QUERIES

    def of(self, num_chunks: int) -> Scores:
        """Scores of the first chunks, each at least a share of its neighbours'. float32 [num_chunks]."""
        padded = np.zeros(num_chunks + 2, np.float32)
        known = self.values[:num_chunks]
        padded[1 : len(known) + 1] = known
        around = np.maximum(padded[:-2], padded[2:]) * np.float32(NEIGHBOUR_SHARE)
        result: Scores = np.maximum(padded[1:-1], around)
        return result
