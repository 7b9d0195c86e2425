"""How often chunks of prefixes were used, faded with age, and a bounded memory of those that are gone. No torch.

A use weighs one and halves with every ``HALF_LIFE`` *turnovers*. One turnover is as many chunks entered as the pool
holds natively, so what counts as old follows the load and the pool, needs no clock and repeats exactly. What a chunk
was worth when it left is remembered for as many chunks as twice the pool holds, under a hash of its prefix: a session
whose user thinks longer than blocks live is known when it comes back. (Ideas: the combined recency and frequency of
LRFU, Lee et al. 2001; ghost entries of ARC, Megiddo and Modha 2003.)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

HALF_LIFE = 4.0  # turnovers
REMEMBERED = 2  # turnovers' worth of chunks


class Popularity:
    """Scores of chunks: pairs (score, when it was last raised) that the prefix cache keeps with each chunk."""

    def __init__(self, capacity_chunks: int) -> None:
        self._capacity = max(1, capacity_chunks)
        self._entered = 0
        # By digest, longest gone first. A plain dict would look for its first entry behind all that were deleted.
        self._gone: OrderedDict[int, tuple[float, int]] = OrderedDict()

    @staticmethod
    def digest(parent: int, tokens: Sequence[int]) -> int:
        """A hash of a whole prefix. Two that collide share a count and nothing else."""
        return hash((parent, *tokens))

    def entered(self) -> None:
        """One more chunk was computed: time goes on."""
        self._entered += 1

    def raised(self, score: float, since: int) -> tuple[float, int]:
        """The score after one more use."""
        return self.faded(score, since) + 1.0, self._entered

    def faded(self, score: float, since: int) -> float:
        """What is left of a score by now."""
        age = self._entered - since
        return score * 0.5 ** (age / (HALF_LIFE * self._capacity)) if age else score

    def remember(self, digest: int, score: float, since: int) -> None:
        """A chunk is gone."""
        if score:
            self._gone.pop(digest, None)
            self._gone[digest] = (score, since)
            if len(self._gone) > REMEMBERED * self._capacity:
                self._gone.popitem(last=False)

    def recall(self, digest: int) -> tuple[float, int]:
        """A chunk is there, perhaps again: its score so far."""
        return self._gone.pop(digest, (0.0, self._entered))

    @property
    def num_remembered(self) -> int:
        return len(self._gone)
