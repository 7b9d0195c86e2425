"""Takes requests' places for others: by parking their KV in host memory, or by having it computed again. No torch.

Loads are given up, and parked KV at last as well, where they stand in the way.
"""

from __future__ import annotations

from engine.events import RequestParked, RequestPreempted
from engine.request import Request, RequestStatus
from engine.scheduler_part import SchedulerPart
from engine.step_draft import StepDraft


class Preemptor(SchedulerPart):
    """Whose place is taken is the caller's choice, but for parked requests: of those the youngest."""

    def preempt(self, request: Request, draft: StepDraft, *, may_park: bool = True) -> None:
        """A running request loses its place, in the step that is being planned too."""
        draft.preempt(request)
        self._queues.running.remove(request)
        request.num_preemptions += 1
        self._queues.put_back(request)
        self._counters.preemptions += 1
        if may_park and self._cache.should_park(request):
            self._cache.park(request)
            self._queues.blocked_at = None
            self._counters.swapped_out += 1
            self._events.emit(RequestParked(self._clock.now_ns(), request.request_id, request.num_computed_tokens))
        else:
            self._lose(request)

    def _lose(self, request: Request) -> None:
        """A preempted request has to compute its KV again."""
        lost = request.num_computed_tokens
        self._queues.lost[request.request_id] = max(lost, self._queues.lost.get(request.request_id, 0))
        self._cache.free(request)
        request.num_computed_tokens = 0
        self._queues.blocked_at = None
        self._events.emit(RequestPreempted(self._clock.now_ns(), request.request_id, lost))

    def lose_parked(self, request: Request) -> None:
        """A parked request has to compute its KV again after all."""
        self._lose(request)
        self._counters.swap_fallbacks += 1

    def lose_youngest_parked(self) -> bool:
        """Room is needed that parked requests hold and the host cannot take: the youngest of them loses its KV."""
        for request in reversed(self._queues.preempted):
            if self._cache.is_parked_here(request):
                self.lose_parked(request)
                return True
        return False

    def stop_loading(self, request: Request) -> None:
        """Somebody else needs the room: back into the queue, with parked KV if it came from there."""
        self._queues.loading.remove(request)
        self._cache.stop_load(request)
        if not self._cache.is_parked(request):
            request.num_computed_tokens = 0
        self._queues.put_back(request)
        self._queues.blocked_at = None

    def fail_load(self, request_id: str) -> None:
        """What a loading request waits for will not come: it computes that itself."""
        request = self._queues.requests.get(request_id)
        if request is None or request.status is not RequestStatus.LOADING:
            return
        self.stop_loading(request)
        if self._cache.is_parked(request):
            self.lose_parked(request)
