"""What a step's results do to requests and counters: tokens appended, KV committed, requests ended. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from engine.finisher import Finisher
from engine.plan import ScheduledSequence, SequenceOutput
from engine.request import FinishReason, Request, RequestStatus
from engine.scheduler_part import SchedulerPart, Shared


class StepResults(SchedulerPart):
    """``eos_token_ids`` end a request, unless it ignores them."""

    def __init__(
        self, shared: Shared, finisher: Finisher, *, max_model_len: int, eos_token_ids: frozenset[int]
    ) -> None:
        super().__init__(shared)
        self._finisher = finisher
        self._max_model_len = max_model_len
        self._eos = eos_token_ids

    def take(self, sequences: Sequence[ScheduledSequence], outputs: Sequence[SequenceOutput]) -> list[Request]:
        """Returns the requests that ended. Outputs of those that ended since are ignored; a sequence that should have
        sampled and has no token counts as not run.
        """
        finished: list[Request] = []
        now_ns = self._clock.now_ns()
        by_request = {output.request: output for output in outputs}
        commit = self._cache.commit
        counters, lost = self._counters, self._queues.lost
        for sequence in sequences:
            request = sequence.request
            output = by_request.get(request)
            if request.status is not RequestStatus.RUNNING:
                continue
            if sequence.samples and (output is None or output.token_id is None):
                continue
            start, number, prompt = sequence.start, sequence.num_tokens, len(request.prompt_ids)
            request.num_computed_tokens = stop = start + number
            if number == 1 and start >= prompt:
                counters.decode_tokens_computed += 1
            else:
                counters.prefill_tokens_computed += number
                if start < prompt <= stop and lost.get(request.request_id, 0) < prompt:
                    counters.prompt_tokens += prompt
            if lost:
                self._count_recomputed(sequence, output)
            commit(request, stop, output.mass if output is not None else None)
            reason = self._take_token(sequence, output, now_ns)
            if reason is not None:
                self._finisher.finish(request, reason)
                finished.append(request)
        return finished

    def _take_token(
        self, sequence: ScheduledSequence, output: SequenceOutput | None, now_ns: int
    ) -> FinishReason | None:
        request, params = sequence.request, sequence.request.params
        if not sequence.samples:
            done = params.max_tokens == 0 and request.num_computed_tokens == request.num_tokens
            return FinishReason.LENGTH if done else None
        if output is None or output.token_id is None:
            return None  # unreachable: ``take`` leaves such a sequence alone
        token = output.token_id
        request.output_ids.append(token)
        if request.first_token_ns is None:
            request.first_token_ns = now_ns
        request.last_token_ns = now_ns
        self._counters.generation_tokens += 1
        if token in params.stop_token_ids or (token in self._eos and not params.ignore_eos):
            return FinishReason.STOP
        length = len(request.output_ids)
        if length >= params.max_tokens or len(request.prompt_ids) + length >= self._max_model_len:
            return FinishReason.LENGTH
        return None

    def _count_recomputed(self, sequence: ScheduledSequence, output: SequenceOutput | None) -> None:
        """Tokens computed once more after a preemption are counted, and their prompt log-probabilities not repeated."""
        request = sequence.request
        lost = self._queues.lost.get(request.request_id)
        if lost is None:
            return
        again = max(0, min(sequence.start + sequence.num_tokens, lost) - sequence.start)
        request.num_recomputed_tokens += again
        self._counters.recomputed_tokens += again
        if output is not None and again:
            output.prompt_logprobs = output.prompt_logprobs[again:]
