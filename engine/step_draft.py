"""A step's plan in the making: who computes how many tokens, within one budget. No torch."""

from __future__ import annotations

from dataclasses import replace

from engine.cache_manager import CacheManager
from engine.plan import ScheduledSequence
from engine.request import Request


class StepDraft:
    """``budget``: tokens that are left. ``preempted``: who lost its place while this was planned."""

    def __init__(self, budget: int, max_chunk: int | None = None) -> None:
        """``max_chunk``: most tokens of one sequence (None: no limit of its own)."""
        self.budget = budget
        self.preempted: list[Request] = []
        self._max_chunk = max_chunk
        self._decodes: dict[str, ScheduledSequence] = {}
        self._chunks: dict[str, ScheduledSequence] = {}

    def chunk(self, request: Request) -> int:
        """Tokens that a request may compute in this step."""
        return self.part(request.num_uncomputed_tokens)

    def part(self, missing: int) -> int:
        """Of so many tokens that a request has not computed, those that it may compute in this step."""
        most = min(self.budget, missing)
        return most if self._max_chunk is None or most < self._max_chunk else self._max_chunk

    def add(self, request: Request, num_tokens: int) -> None:
        """The request computes so many tokens; they have slots."""
        self.put(request, num_tokens, request.num_uncomputed_tokens)

    def put(self, request: Request, num_tokens: int, missing: int) -> None:
        """The same for one whose missing tokens have been counted."""
        start = request.num_computed_tokens
        samples = num_tokens == missing and request.params.max_tokens > 0
        is_decode = num_tokens == 1 and start >= len(request.prompt_ids)
        part = ScheduledSequence(request, start, num_tokens, samples)
        (self._decodes if is_decode else self._chunks)[request.request_id] = part
        self.budget -= num_tokens

    def preempt(self, request: Request) -> None:
        """The request computes nothing after all."""
        name = request.request_id
        sequence = self._decodes.pop(name, None) or self._chunks.pop(name, None)
        if sequence is not None:
            self.budget += sequence.num_tokens
        self.preempted.append(request)

    def ordered(self, cache: CacheManager) -> tuple[ScheduledSequence, ...]:
        """Decodes, then prefill chunks (a prompt's last token alone is one)."""
        planned = [*self._decodes.values(), *self._chunks.values()]
        if cache.observes:
            for index, part in enumerate(planned):
                count = cache.observed_queries(part.request, part.start, part.start + part.num_tokens)
                planned[index] = replace(part, observed=count)
        return tuple(planned)
