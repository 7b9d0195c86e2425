"""Takes requests from the queue's head into the running ones, never past one that does not fit. No torch.

A request that needs KV from the host is *loading* until it has come; others run, and are admitted, meanwhile.
"""

from __future__ import annotations

from engine.admission import most_tokens
from engine.events import RequestAdmitted, RequestLoading
from engine.finisher import Finisher
from engine.preemptor import Preemptor
from engine.request import Request
from engine.scheduler_part import SchedulerPart, Shared
from engine.step_draft import StepDraft


class Admitter(SchedulerPart):
    """In the order of the queue."""

    def __init__(self, shared: Shared, preemptor: Preemptor, finisher: Finisher, *, max_model_len: int) -> None:
        super().__init__(shared)
        self._preemptor = preemptor
        self._finisher = finisher
        self._max_model_len = max_model_len

    def admit_next(self, draft: StepDraft) -> bool:
        """Start the queue's head if there is room for its whole prompt; False to stop trying in this step."""
        queues, cache = self._queues, self._cache
        request = queues.head()
        if request is None:
            return False
        if not cache.can_ever_fit(max(most_tokens(request, self._max_model_len), request.num_tokens)):
            self._finisher.fail(request)  # settings changed while it waited
            return True
        state = (cache.room_version, queues.num_active)
        if queues.blocked_at == state and (queues.num_active or cache.num_transfers):
            return False
        if cache.is_parked(request):
            return self._resume(request)
        is_idle = not queues.num_active and not cache.num_transfers
        request.num_computed_tokens = cache.match_prefix(request)
        if self._fits(request):
            if cache.needs_load(request):
                if cache.begin_load(request):
                    self.wait_for_load(request, was_parked=False)
                    return True
                if is_idle:  # there will never be room for it as it is stored: compute it
                    cache.free(request)
                    request.num_computed_tokens = cache.match_prefix(request, on_device=True)
            if not cache.needs_load(request) and self._allocate_first(request, draft):
                queues.take_head()
                self._start(request)
                return True
        lacks = cache.missing_tokens(request)
        cache.free(request)
        request.num_computed_tokens = 0
        if is_idle and self._preemptor.lose_youngest_parked():
            return True
        self._block(lacks)
        return False

    def _block(self, lacks_tokens: int) -> None:
        """The head does not fit. Room is read again: taking up and letting go of a prefix counts as new room."""
        self._queues.blocked_at = (self._cache.room_version, self._queues.num_active)
        self._queues.blocked_tokens = self._missing_tokens() + lacks_tokens + self._cache.watermark_tokens()

    def start_loaded(self) -> None:
        """Start those for which all KV has come."""
        queues, cache = self._queues, self._cache
        for request in [request for request in queues.loading if cache.is_loaded(request)]:
            queues.loading.remove(request)
            was_parked, host_tokens = cache.end_load(request)
            self._counters.swapped_in += was_parked
            if request.first_scheduled_ns is None:
                self._counters.host_hit_tokens += host_tokens
            self._start(request)

    def _start(self, request: Request) -> None:
        """The request runs from now on, with its cached prefix or with what it had when it was parked."""
        resumed = request.num_preemptions > 0
        cached = request.num_computed_tokens
        self._queues.run(request)
        now_ns = self._clock.now_ns()
        if request.first_scheduled_ns is None:
            request.first_scheduled_ns = now_ns
            request.num_cached_tokens = cached
            self._counters.requests_admitted += 1
            if request.cache.use_prefix_cache and request.params.prompt_logprobs is None:
                self._counters.prefix_cache_queries += len(request.prompt_ids)
                self._counters.prefix_cache_hits += cached
        self._events.emit(RequestAdmitted(now_ns, request.request_id, cached, resumed))

    def _resume(self, request: Request) -> bool:
        """Bring the head of the queue, which is parked, back; False to stop trying in this step."""
        cache = self._cache
        is_idle = not self._queues.num_active and not cache.num_transfers
        if is_idle:
            # Nothing will change by itself: what is cached must go, then younger ones' KV, then its own.
            cache.drop_idle()
        if self._fits(request) and cache.begin_load(request, use_reserve=is_idle):
            self.wait_for_load(request, was_parked=True)
            return True
        if cache.begin_stream(request, cache.room_tokens() - self._missing_tokens()):
            self.wait_for_load(request, was_parked=True)
            return True
        if is_idle:
            if not self._preemptor.lose_youngest_parked():
                self._preemptor.lose_parked(request)
            return True
        self._block(cache.missing_tokens(request))
        return False

    def wait_for_load(self, request: Request, *, was_parked: bool) -> None:
        """The head's load has begun."""
        self._queues.take_head()
        self._queues.load(request)
        self._events.emit(RequestLoading(self._clock.now_ns(), request.request_id, was_parked))

    def _missing_tokens(self) -> int:
        """What active requests still lack."""
        return sum(self._cache.missing_tokens(other) for other in (*self._queues.running, *self._queues.loading))

    def _fits(self, request: Request) -> bool:
        """Whether all known tokens fit, besides what active requests still lack. Alone, trying is enough."""
        if not self._queues.num_active:
            return True
        return self._missing_tokens() + self._cache.missing_tokens(request) <= self._cache.room_tokens()

    def _allocate_first(self, request: Request, draft: StepDraft) -> bool:
        cache, is_alone = self._cache, not self._queues.running
        num_tokens = draft.chunk(request)
        done = cache.allocate(request, num_tokens, end_pins=is_alone)
        if not done and is_alone:
            # Alone: what is cached must not stand in the way, not even the request's own prefix.
            cache.free(request)
            cache.drop_idle()
            request.num_computed_tokens = 0
            num_tokens = draft.chunk(request)
            done = cache.allocate(request, num_tokens)
        if done:
            draft.add(request, num_tokens)
        return done
