"""What a step did for a request, as clients are told. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from engine.plan import TokenLogprobs
from engine.request import FinishReason


@dataclass(slots=True)
class RequestDelta:
    """What one step did for one request; a copy, so that other threads may read it.

    ``num_evicted_tokens``: so far. ``num_pinned_tokens``: of the prompt, once it is complete. ``finish_reason`` comes
    with the last delta of a request and only then. ``error`` is for people.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    num_evicted_tokens: int = 0
    num_pinned_tokens: int = 0
