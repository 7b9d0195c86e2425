"""Ends requests: out of their queue, their KV freed, counted and reported. No torch."""

from __future__ import annotations

from engine.events import RequestFinished
from engine.request import FinishReason, Request, RequestStatus
from engine.scheduler_part import SchedulerPart, Shared


class Finisher(SchedulerPart):
    """Keeps those that failed until they are asked for."""

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self.failed: list[Request] = []  # ended while planning, and not reported yet

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request, wherever it stands."""
        self._queues.remove(request)
        self._cache.free(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.finished_ns = self._clock.now_ns()
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._counters.requests_completed += 1
        elif reason is FinishReason.ABORT:
            self._counters.requests_aborted += 1
        else:
            self._counters.requests_failed += 1
        self._events.emit(
            RequestFinished(request.finished_ns, request.request_id, reason.value, len(request.output_ids))
        )

    def fail(self, request: Request) -> None:
        """End a request that cannot run any more."""
        self.finish(request, FinishReason.ERROR)
        self.failed.append(request)

    def take_failed(self) -> list[Request]:
        """Those that failed since this was last asked."""
        failed, self.failed = self.failed, []
        return failed
