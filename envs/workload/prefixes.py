"""What hash ids say about prompts: which stretches are shared, and how much of it an endless cache would hit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from envs.workload.trace import Trace, TraceRequest

# Kinds of stretches: the tokens of a shared block, and the tail that belongs to one request alone.
SHARED: Final = 0
OWN: Final = 1


def segments(request: TraceRequest, index: int, block_tokens: float) -> list[tuple[int, int, int]]:
    """The prompt as (kind, key, tokens): one per hash id, then the request's own rest.

    Blocks end at rounded multiples of ``block_tokens``, so that equal beginnings stay equal when it is a fraction.
    """
    parts, filled = [], 0
    for i, hash_id in enumerate(request.hash_ids):
        end = min(round((i + 1) * block_tokens), request.prompt_tokens)
        if end > filled:
            # Non-negative entropy is all that generators take; 2 id or 2 |id| - 1 keeps ids apart.
            parts.append((SHARED, 2 * hash_id if hash_id >= 0 else -2 * hash_id - 1, end - filled))
            filled = end
    if filled < request.prompt_tokens:
        parts.append((OWN, index, request.prompt_tokens - filled))
    return parts


def shared_fraction(trace: Trace) -> float:
    """Share of prompt tokens whose whole prefix occurred in an earlier request: the hit ratio of an endless cache."""
    return hit_ratio(trace.requests, trace.block_tokens)


def hit_ratio(requests: Iterable[TraceRequest], block_tokens: float) -> float:
    """:func:`shared_fraction` of requests in order; memory grows with the distinct blocks."""
    seen: set[int] = set()
    hits = total = 0
    for index, request in enumerate(requests):
        leading = True
        for kind, key, length in segments(request, index, block_tokens):
            total += length
            leading = leading and kind == SHARED and key in seen
            hits += length if leading else 0
            if kind == SHARED:
                seen.add(key)
    return hits / total if total else 0.0
