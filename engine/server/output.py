"""From engine deltas to text: detokenising, stop strings, log-probabilities of one answer. The same for both ways of
delivery, so that the concatenated stream is the whole answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from engine.detokenizer import Detokenizer
from engine.plan import TokenLogprobs
from engine.request import FinishReason
from engine.request_delta import RequestDelta
from engine.server.intake import Ask
from engine.stop_strings import StopStrings


@dataclass
class Piece:
    """What may be sent now. ``finish_reason`` is ``stop``, ``length``, ``abort`` or ``error``, with the last piece."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    needs_stop: bool = False  # a stop string ended the text while the engine is still generating

    def extend(self, other: Piece) -> None:
        self.text += other.text
        self.token_ids += other.token_ids
        self.logprobs += other.logprobs
        self.prompt_logprobs += other.prompt_logprobs
        self.finish_reason = other.finish_reason
        self.stop_reason = other.stop_reason
        self.error = other.error
        self.needs_stop = other.needs_stop


class Answer:
    """One request's answer as it grows. ``completion_tokens`` counts up to the token that completed a stop;
    ``pinned_tokens`` is None for a request that does not ask for a pin.
    """

    def __init__(self, ask: Ask, detokenizer: Detokenizer, is_eos: Callable[[int], bool]) -> None:
        self._ask = ask
        self._detokenizer = detokenizer
        self._stops = StopStrings(ask.stops, include=ask.include_stop)
        self._is_eos = is_eos
        self.prompt_tokens = len(ask.request.prompt_ids)
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.evicted_tokens = 0
        self.pinned_tokens = None if ask.request.cache.prefix_ttl_s is None else 0
        self.finish_reason: str | None = None

    def feed_all(self, deltas: Iterable[RequestDelta]) -> Piece:
        """One piece for all deltas that have come; those after the end are dropped."""
        piece = Piece()
        for delta in deltas:
            if self.finish_reason is None:
                piece.extend(self._feed(delta))
        return piece

    def _feed(self, delta: RequestDelta) -> Piece:
        piece = Piece(prompt_logprobs=list(delta.prompt_logprobs), error=delta.error)
        self.cached_tokens = delta.num_cached_tokens or self.cached_tokens
        self.evicted_tokens = delta.num_evicted_tokens or self.evicted_tokens
        self.pinned_tokens = delta.num_pinned_tokens or self.pinned_tokens
        self._feed_tokens(delta, piece)
        if piece.finish_reason is None and delta.finish_reason is not None:
            piece.finish_reason = delta.finish_reason.value
            piece.text += self._stops.feed(self._detokenizer.flush())
            if self._stops.matched is not None:
                piece.finish_reason, piece.stop_reason = "stop", self._stops.matched
            piece.text += self._stops.flush()
        self.finish_reason = piece.finish_reason
        return piece

    def _feed_tokens(self, delta: RequestDelta, piece: Piece) -> None:
        for index, token_id in enumerate(delta.token_ids):
            self.completion_tokens += 1
            piece.token_ids.append(token_id)
            piece.logprobs += delta.logprobs[index : index + 1]
            ends_here = delta.finish_reason is FinishReason.STOP and index == len(delta.token_ids) - 1
            if ends_here:
                # The token that ends an answer is no part of its text. Clients learn which one, unless it is the usual.
                piece.stop_reason = None if self._is_eos(token_id) else token_id
                continue
            piece.text += self._stops.feed(self._detokenizer.feed(token_id))
            if self._stops.matched is not None:
                piece.finish_reason, piece.stop_reason = "stop", self._stops.matched
                piece.needs_stop = delta.finish_reason is None
                return
