"""A request and its life: what was asked, what has been computed, when things happened. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Final

_COLDEST: Final = 1e-5


class RequestStatus(StrEnum):
    WAITING = "waiting"  # never run yet
    RUNNING = "running"
    PREEMPTED = "preempted"  # ran, lost its place; its KV is to be recomputed, or parked
    LOADING = "loading"  # admitted, waits for KV from the host
    FINISHED = "finished"


class FinishReason(StrEnum):
    STOP = "stop"  # end-of-sequence token, stop token or stop string
    LENGTH = "length"
    ABORT = "abort"  # the client went away or cancelled
    ERROR = "error"


@dataclass(frozen=True)
class SamplingParams:
    """How output tokens are chosen and when to stop. ``temperature`` 0 is greedy; ``top_k`` 0 means all tokens.

    ``logprobs``/``prompt_logprobs``: number of top alternatives reported per token beside the token itself (0 reports
    the token alone), None for none. Stop strings are the server's business and do not appear here.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0

    @cached_property
    def is_greedy(self) -> bool:
        """Nearly 0 counts as 0, with vLLM's bound; dividing by less than float32 holds would give NaN."""
        return self.temperature < _COLDEST

    @cached_property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


@dataclass(frozen=True)
class CachePolicy:
    """What a request lets be done to its KV.

    ``kv_format_floor``: the lossiest format allowed (None: whatever the engine uses). ``salt`` separates prefix caches.
    ``prefix_ttl_s``: the prompt's prefix is not given up for others until so long after its last use (None: it may be).
    """

    kv_format_floor: str | None = None
    allow_eviction: bool = True
    use_prefix_cache: bool = True
    salt: str = ""
    prefix_ttl_s: float | None = None


@dataclass(eq=False)
class Request:
    """One request inside the engine. Identity semantics: compared and hashed by object.

    ``num_computed_tokens`` counts tokens whose KV is in the cache (prefix hits included). ``all_ids`` is prompt then
    output; the next token to compute is at position ``num_computed_tokens`` of it.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    arrival_ns: int
    cache: CachePolicy = field(default_factory=CachePolicy)
    status: RequestStatus = RequestStatus.WAITING
    output_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # prefix hit at first admission
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_evicted_tokens: int = 0  # in the layer group that lost most; each counts once, also after a preemption
    num_pinned_tokens: int = 0  # of the prompt, kept cached as `prefix_ttl_s` asks; 0 where the cap left no room
    evicted_chunks: list[int] = field(default_factory=list)  # per layer group, as masks of 16 tokens
    first_scheduled_ns: int | None = None
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    finished_ns: int | None = None
    finish_reason: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens whose KV is not in the cache."""
        return len(self.prompt_ids) + len(self.output_ids) - self.num_computed_tokens

    @property
    def all_ids(self) -> list[int]:
        return self.prompt_ids + self.output_ids
