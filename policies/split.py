"""What policies may learn from and what they are judged on, declared once. Stdlib only.

The parts share no source of lengths or arrivals that a policy could have learnt by heart, except where ``shifts`` mix
known regimes into an order that training never shows. Seeds are kept apart as well: evaluation adds
:data:`EVALUATION_SEED` to its own, so that no generated minute is seen twice.

Training keeps its held-out episodes apart in another way (:mod:`policies.train.traffic`): it draws several streams from
one seed, by sequences of numbers, while evaluation gives generators one number each. Either way for both would give
every existing seed other traffic, and results could no longer be compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final

EVALUATION_SEED: Final = 1_000_000


class Family(StrEnum):
    """What is asked of a policy: to leave a good setting alone, to follow peaks, or to notice a change of kind."""

    STEADY = "steady"
    BURSTY = "bursty"
    SHIFT = "shift"


TRAINING: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "chat-steady": Family.STEADY,
        "chat-poisson": Family.STEADY,
        "chat-bursty": Family.BURSTY,
        "code-bursty": Family.BURSTY,
        "code-gamma13": Family.BURSTY,
        "agent-shared-prefix": Family.STEADY,
        "chat-turns": Family.STEADY,
        "diurnal": Family.SHIFT,
        "chat-week": Family.SHIFT,
    }
)

HELD_OUT: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "reasoning-long": Family.STEADY,
        "chat-shared-prefix": Family.STEADY,
        "reasoning-bursty": Family.BURSTY,
        "flash-crowd": Family.SHIFT,
        "regime-shift": Family.SHIFT,
    }
)


def family(workload: str) -> Family:
    """Of a built-in workload; a recorded trace counts as bursty, since nobody knows."""
    return {**TRAINING, **HELD_OUT}.get(workload, Family.BURSTY)
