"""What is fixed for the life of an engine's core. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CoreOptions:
    """Fixed for the life of an engine. ``idle_recode_tokens``: KV recoded at a time while nothing runs; commands are
    taken in between. ``recode_share``: of a step's time that recoding may take while requests run; 0 leaves the
    scheduler's own budget alone.
    """

    model: str
    instance: str
    max_model_len: int
    idle_recode_tokens: int = 2048
    recode_share: float = 0.0
