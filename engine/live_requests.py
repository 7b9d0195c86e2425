"""The requests of a core that have not ended, and what is said of them after a step. No torch."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from engine.clock import Clock
from engine.core_failures import Failures
from engine.core_stats import CoreStats, LiveRequest
from engine.plan import SequenceOutput
from engine.request import FinishReason, Request
from engine.request_delta import RequestDelta
from engine.scheduler import Scheduler

_log = logging.getLogger(__name__)


class LiveRequests:
    """``by_id``: oldest first."""

    def __init__(self, scheduler: Scheduler, stats: CoreStats, clock: Clock, failures: Failures) -> None:
        self.by_id: dict[str, LiveRequest] = {}
        self._scheduler = scheduler
        self._stats = stats
        self._clock = clock
        self._failures = failures

    def end(self, request_id: str, reason: FinishReason) -> bool:
        """End a request and free what it holds; False when there is none of that id (any more)."""
        record = self.by_id.pop(request_id, None)
        if record is None:
            return False
        try:
            self._scheduler.abort(request_id, reason)
        except Exception as error:  # noqa: BLE001 - bookkeeping is beyond repair, and clients must hear of it
            _log.exception("freeing request %s failed", request_id)
            self._failures.give_up(error)
        if reason is FinishReason.STOP:
            self._stats.completed(record.request, self._clock.now_ns())
        return True

    def fail(
        self, request_ids: Collection[str], error: str, reason: FinishReason = FinishReason.ERROR
    ) -> list[RequestDelta]:
        """End requests, with a delta that says why for each."""
        deltas = []
        for request_id in request_ids:
            self.end(request_id, reason)
            deltas.append(RequestDelta(request_id, finish_reason=reason, error=error))
        return deltas

    def unfit(self, requests: Collection[Request]) -> list[RequestDelta]:
        """Requests that the scheduler gave up while planning: settings changed, and they fit no longer (case G.24)."""
        for request in requests:
            self.by_id.pop(request.request_id, None)
        message = "the KV pool has no room for this request any more; shorten it, or enlarge the pool"
        return [
            RequestDelta(request.request_id, finish_reason=FinishReason.ERROR, error=message) for request in requests
        ]

    def deltas(self, outputs: Sequence[SequenceOutput], finished: Sequence[Request], now_ns: int) -> list[RequestDelta]:
        """What a step did; ``finished``: who ended in it, with an output or while it was planned."""
        ended = set(finished)
        deltas: list[RequestDelta] = []
        sampled: list[LiveRequest] = []
        for output in outputs:
            request = output.request
            record = self.by_id.get(request.request_id)
            if record is None:
                continue
            if output.token_id is not None:
                sampled.append(record)
            reason = None
            if request in ended:
                ended.discard(request)
                del self.by_id[request.request_id]
                reason = request.finish_reason
                self._stats.completed(request, now_ns)
            elif output.token_id is None and not output.prompt_logprobs:
                continue
            deltas.append(
                RequestDelta(
                    request.request_id,
                    () if output.token_id is None else (output.token_id,),
                    () if output.logprobs is None else (output.logprobs,),
                    tuple(output.prompt_logprobs) if output.prompt_logprobs else (),
                    request.num_cached_tokens,
                    reason,
                    num_evicted_tokens=request.num_evicted_tokens,
                    num_pinned_tokens=request.num_pinned_tokens,
                )
            )
        self._stats.tokens(sampled, now_ns)
        return deltas + self.unfit(ended) if ended else deltas
