"""Requests of a trace as a simulated engine gets them: prompts made of identities, no text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from engine.request import CachePolicy, Request, SamplingParams
from envs.workload.trace import TraceRequest

_SPAN: Final = 1 << 21  # more tokens than any prompt or output has, so that no two ranges meet
_PRIVATE: Final = CachePolicy(use_prefix_cache=False)
_SHARED: Final = CachePolicy()


@dataclass(eq=False)
class SimRequest(Request):
    """A request whose output is the token ``token`` again and again, which no other request has.

    ``late_gaps``: gaps between its tokens that were longer than the target. ``trace_index``: its place in the trace.
    ``share``: what :mod:`envs.simulated_runner` remembers of it. ``attention``: what
    :mod:`envs.synthetic_attention` drew for it.
    """

    token: int = 0
    late_gaps: int = 0
    trace_index: int = -1
    share: Any = None
    attention: tuple[npt.NDArray[np.float32], ...] | None = None


def make_request(
    source: TraceRequest, index: int, arrival_ns: int, block_tokens: float, *, max_model_len: int, prefix_cache: bool
) -> SimRequest:
    """The request at ``index`` of a trace. Equal hash ids become equal tokens, everything else is unique.

    Prompt and output are cut to a context of ``max_model_len`` tokens as ``autotune replay`` cuts them. Without
    ``prefix_cache`` the request opts out, and its prompt is a row of zeros: nobody looks at it.
    """
    output = min(source.output_tokens, max(1, max_model_len // 2))
    prompt = min(source.prompt_tokens, max(1, max_model_len - output))
    return SimRequest(
        request_id=str(index),
        prompt_ids=_prompt(source, index, prompt, block_tokens) if prefix_cache else [0] * prompt,
        params=SamplingParams(max_tokens=output, ignore_eos=True),
        arrival_ns=arrival_ns,
        cache=_SHARED if prefix_cache else _PRIVATE,
        token=(2 * index + 2) * _SPAN - 1,
        trace_index=index,
    )


def _prompt(source: TraceRequest, index: int, length: int, block_tokens: float) -> list[int]:
    """Blocks end at rounded multiples of ``block_tokens``: equal beginnings stay equal when it is a fraction."""
    ids: list[int] = []
    for number, hash_id in enumerate(source.hash_ids):
        end = min(round((number + 1) * block_tokens), length)
        if end > len(ids):
            # Odd spans are shared blocks' (ids of either sign), even ones the requests' own.
            first = (4 * hash_id + 1 if hash_id >= 0 else -4 * hash_id - 1) * _SPAN
            ids.extend(range(first, first + end - len(ids)))
    own = 2 * index * _SPAN
    ids.extend(range(own, own + length - len(ids)))
    return ids
