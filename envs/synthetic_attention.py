"""What simulated requests attend, for eviction by attention: drawn, since nothing is computed. No torch.

Every chunk of 16 positions has a weight for life, log-normal, and the latest chunks count for more. How much so was
measured on the bundled model over running text (docs/LOG.md, 2026-11-30). Such a mass says nothing about quality. It
makes counts true: which tokens are kept out of order, how many blocks stay in parts, what is split and copied for it.
"""

from __future__ import annotations

import zlib
from typing import Final, cast

import numpy as np

from engine.attention_mass import ObservedMass, Scores
from engine.formats import CHUNK_TOKENS
from engine.request import Request
from envs.sim_request import SimRequest

LOG_SPREAD: Final = 0.31  # standard deviation of the log of middle chunks' mass
LATEST: Final = np.array([3.5, 5.0, 18.0, 35.0], np.float32)  # of the last chunks' mass over the middle ones'
MIDDLE: Final = np.float32(0.02)  # mass of a chunk in the middle


class SyntheticAttention:
    """Draws for a model of ``groups`` layer groups; the same ``seed`` gives the same mass in any process."""

    def __init__(self, groups: int, seed: int = 0) -> None:
        self._groups = groups
        self._seed = seed

    def of(self, request: Request, stop: int, queries: int) -> ObservedMass:
        """What the ``queries`` tokens before position ``stop`` attend."""
        chunks = -(-stop // CHUNK_TOKENS)
        return ObservedMass(queries, tuple(self._mass(weights, chunks) for weights in self._weights(request, chunks)))

    def _mass(self, weights: Scores, chunks: int) -> Scores:
        mass: Scores = weights[:chunks] * MIDDLE
        latest = min(chunks, len(LATEST))
        mass[chunks - latest :] *= LATEST[len(LATEST) - latest :]
        return mass

    def _weights(self, request: Request, chunks: int) -> tuple[Scores, ...]:
        mine = cast("SimRequest", request)
        if mine.attention is None or len(mine.attention[0]) < chunks:
            # As many as its longest context has, so that nothing is drawn twice.
            most = -(-(len(request.prompt_ids) + request.params.max_tokens) // CHUNK_TOKENS)
            key = zlib.crc32(request.request_id.encode())
            mine.attention = tuple(
                np.exp(
                    LOG_SPREAD
                    * np.random.default_rng((self._seed, key, group)).standard_normal(max(most, chunks), np.float32)
                )
                for group in range(self._groups)
            )
        return mine.attention
