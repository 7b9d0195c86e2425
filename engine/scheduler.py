"""What to run next. Pure bookkeeping: returns plans, touches no tensor, reads time from the clock it is given.

One step's token budget goes to decodes first, then to prefills that are under way, then to admissions: preempted
requests before new ones, each in order of arrival, never past one that does not fit. (Orca's iteration-level batching
and Sarathi's chunked prefill; preemption by recomputation as in vLLM, or by parking KV in host memory.)

An admitted request that needs KV from the host is *loading* until it has come; others run, and are admitted,
meanwhile.

Nothing hangs: the oldest running request takes blocks from younger ones, so it always ends; a request that could not
even run alone is refused at admission, or ends in an error if the settings have changed since. Loads are given up, and
parked KV at last as well, where they stand in the way. A plan may be empty while copies are under way: their end is the
next thing that happens.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine.cache_manager import CacheManager
from engine.clock import Clock
from engine.events import (
    EventSink,
    NullSink,
    RequestAdded,
    RequestAdmitted,
    RequestFinished,
    RequestLoading,
    RequestParked,
    RequestPreempted,
    RequestRejected,
    StepScheduled,
    TunablesApplied,
)
from engine.formats import lossiness_of
from engine.plan import RecodeBatch, ScheduledSequence, SequenceOutput, StepPlan
from engine.prefix_pins import MAX_TTL_S
from engine.request import FinishReason, Request, RequestStatus
from engine.stats import Counters
from engine.tunables import TunableValues, parse_change


class AdmissionError(Exception):
    """A request refused at once. ``kind``: queue_full (429), too_long (400), can_never_fit (400), invalid (400)."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


class Scheduler:
    """Continuous batching with chunked prefill over one cache.

    Per step: ``plan = schedule()``, the executor runs it, ``update(plan, outputs)``. ``max_model_len`` counts prompt
    and output tokens; ``max_waiting`` bounds requests that never ran. ``counters`` (shared with the core) get
    everything but times and histograms: requests_*, *_tokens, preemptions, recomputed_tokens, prefix_cache_*, steps;
    of the times, that of planning and swapping recodes.
    """

    def __init__(
        self,
        cache: CacheManager,
        values: TunableValues,
        *,
        max_model_len: int,
        max_waiting: int,
        clock: Clock,
        counters: Counters | None = None,
        events: EventSink | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        recode_tokens_per_step: int = 0,
        sync_recode: bool = False,
        max_chunk_tokens: int | None = None,
    ) -> None:
        """``max_chunk_tokens``: most tokens of one sequence in one step, within the budget that they share.

        Who recodes: with ``recode_tokens_per_step`` > 0 every plan brings conversions within that budget, with
        ``sync_recode`` all that are eligible, so that output depends on no schedule; the executor runs them before the
        plan's sequences and ``update`` swaps them. By default plans bring none, and the caller runs
        ``cache.plan_recodes`` and ``finish_recodes`` between steps itself.
        """
        self.cache = cache
        self.max_model_len = max_model_len
        self.max_waiting = max_waiting
        self.counters = counters if counters is not None else Counters()
        self._clock = clock
        self._events: EventSink = events if events is not None else NullSink()
        self.is_silent = isinstance(self._events, NullSink)  # nobody listens: events of steps need not be made
        self._eos = eos_token_ids
        self._recode_tokens = recode_tokens_per_step
        self._sync_recode = sync_recode
        self._max_chunk = max_chunk_tokens
        self._values = dict(values)
        self._max_batched, self._max_seqs = _limits(values)
        self._requests: dict[str, Request] = {}
        self._running: list[Request] = []  # by arrival
        self._loading: list[Request] = []  # by arrival
        self._preempted: list[Request] = []  # by arrival
        self._waiting: deque[Request] = deque()
        self._failed: list[Request] = []  # ended while planning, reported by the next update
        self._lost: dict[str, int] = {}  # tokens that a preempted request had computed
        self._served_to = 0  # where decoding goes on when the budget is smaller than the number of decodes
        self._blocked_at: tuple[int, int] | None = None  # room and running when the queue's head last did not fit

    # -- requests -------------------------------------------------------------------------------------------------

    @property
    def running(self) -> Sequence[Request]:
        """Requests that hold KV, oldest arrival first."""
        return self._running

    @property
    def waiting(self) -> Sequence[Request]:
        """Requests that do not run: loading ones, then in the order they will be admitted, preempted ones first."""
        return [*self._loading, *self._preempted, *self._waiting]

    @property
    def loading(self) -> Sequence[Request]:
        """Requests that wait for KV from the host, oldest arrival first."""
        return self._loading

    @property
    def num_parked(self) -> int:
        """Preempted requests that keep their KV."""
        return sum(self.cache.is_parked(request) for request in self._preempted)

    @property
    def num_waiting(self) -> int:
        return len(self._loading) + len(self._preempted) + len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything: requests, failures to report, recodes if they are the plans' business."""
        recodes = self._sync_recode or self._recode_tokens > 0
        return bool(self._requests or self._failed) or (recodes and self.cache.has_recode_work())

    def get(self, request_id: str) -> Request | None:
        """The request of that id, if it is waiting or running."""
        return self._requests.get(request_id)

    def add(self, request: Request) -> None:
        """Queue a request. Raises AdmissionError (nothing kept): what it says is for the user."""
        self.counters.requests_offered += 1
        self.counters.offered_prompt_tokens += len(request.prompt_ids)
        try:
            self._check(request)
        except AdmissionError as error:
            self.counters.requests_rejected += 1
            self._events.emit(RequestRejected(self._clock.now_ns(), request.request_id, error.kind))
            raise
        self._requests[request.request_id] = request
        self._waiting.append(request)
        self._events.emit(RequestAdded(self._clock.now_ns(), request.request_id, len(request.prompt_ids)))

    def _check(self, request: Request) -> None:
        prompt, most = len(request.prompt_ids), request.params.max_tokens
        if request.request_id in self._requests:
            raise AdmissionError("invalid", f"request id {request.request_id!r} is in use")
        if prompt < 1:
            raise AdmissionError("invalid", "the prompt has no tokens; send at least one")
        if most < 0:
            raise AdmissionError("invalid", f"max_tokens must be >= 0, got {most}")
        try:
            lossiness_of(request.cache.kv_format_floor)
        except ValueError as error:
            raise AdmissionError("invalid", str(error).replace("kv_format ", "kv_format_floor ", 1)) from error
        ttl_s = request.cache.prefix_ttl_s
        if ttl_s is not None and not 0 < ttl_s <= MAX_TTL_S:
            raise AdmissionError("invalid", f"prefix_ttl_s is in seconds, above 0 and up to {MAX_TTL_S:g}, got {ttl_s}")
        if ttl_s is not None and not request.cache.use_prefix_cache:
            raise AdmissionError("invalid", "prefix_ttl_s keeps a prefix cached; it needs use_prefix_cache")
        if prompt + min(most, 1) > self.max_model_len:
            raise AdmissionError(
                "too_long", f"the prompt has {prompt} tokens; with output at most {self.max_model_len} fit the model"
            )
        needed = self._most_tokens(request)
        if not self.cache.can_ever_fit(needed):
            raise AdmissionError(
                "can_never_fit",
                f"prompt and max_tokens need KV of {needed} tokens; the pool holds "
                f"{self.cache.max_sequence_tokens()}: send less, or start the engine with a larger --kv-pool-bytes",
            )
        if len(self._waiting) >= self.max_waiting:
            raise AdmissionError("queue_full", f"{len(self._waiting)} requests are waiting already; try again later")

    def _most_tokens(self, request: Request) -> int:
        """Most tokens whose KV the request will need: the last output token's is never computed."""
        total = min(len(request.prompt_ids) + request.params.max_tokens, self.max_model_len)
        return max(total - 1, len(request.prompt_ids))

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> Request | None:
        """End a request at any point, also between ``schedule`` and ``update``; its KV is freed at once.

        Returns it (status FINISHED), or None when it is unknown or has finished already. Not reported by ``update``.
        """
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, reason)
        return request

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
        elif request.status is RequestStatus.LOADING:
            self._loading.remove(request)
        elif request.status is RequestStatus.PREEMPTED:
            self._preempted.remove(request)
        else:
            self._waiting.remove(request)
        del self._requests[request.request_id]
        self._lost.pop(request.request_id, None)
        self.cache.free(request)
        self._blocked_at = None
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.finished_ns = self._clock.now_ns()
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.counters.requests_completed += 1
        elif reason is FinishReason.ABORT:
            self.counters.requests_aborted += 1
        else:
            self.counters.requests_failed += 1
        self._events.emit(
            RequestFinished(request.finished_ns, request.request_id, reason.value, len(request.output_ids))
        )

    # -- planning -------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """The next step, with slots allocated and recodes planned. Every plan, empty ones too, goes to ``update``."""
        self.cache.pins.expire()
        step = _Step(self._max_batched)
        for request in [request for request in self._loading if self.cache.is_loaded(request)]:
            self._loading.remove(request)
            was_parked, host_tokens = self.cache.end_load(request)
            self.counters.swapped_in += was_parked
            if request.first_scheduled_ns is None:
                self.counters.host_hit_tokens += host_tokens
            self._start(request)
        decoding: list[Request] = []
        prefilling: list[Request] = []
        for request in self._running:
            (decoding if _remaining(request) == 1 else prefilling).append(request)
        if len(decoding) > step.budget:
            # Whoever had to wait goes first next time; without this the youngest would starve.
            start = self._served_to % len(decoding)
            decoding = decoding[start:] + decoding[:start]
            self._served_to = start + step.budget
        for request in (*decoding, *prefilling):
            if step.budget and request.status is RequestStatus.RUNNING:
                self._continue(request, step)
        if not step.preempted:
            while step.budget and self._num_active < self._max_seqs and self._admit_next(step):
                pass
        recodes: tuple[RecodeBatch, ...] = ()
        if self._sync_recode or self._recode_tokens:
            begin_ns = self._clock.now_ns()
            recodes = self.cache.plan_recodes(self._recode_tokens, sync=self._sync_recode, in_step=True)
            self.counters.recode_time_ns += self._clock.now_ns() - begin_ns
        plan = StepPlan(step.ordered(self.cache), recodes, tuple(step.preempted))
        if not plan.is_empty and not self.is_silent:
            self._report(plan)
        return plan

    def _continue(self, request: Request, step: _Step) -> None:
        """Schedule a running request, at the expense of younger ones if the pool is full."""
        num_tokens = self._chunk(request, step)
        while not self.cache.allocate(request, num_tokens):
            if self._loading:
                self._stop_loading(self._loading[-1])
                continue
            if self.cache.is_room_coming(request, num_tokens):
                return
            if self._lose_parked() or self.cache.press(request, num_tokens, reversed(self._running)):
                continue
            victim = self._running[-1]
            if victim is not request:
                self._preempt(victim, step)
                continue
            if len(self._running) == 1:
                if self.cache.allocate(request, num_tokens, use_reserve=True):
                    break
                self._start_over(request, step)
            elif _remaining(request) == 1:
                self._preempt(request, step)
            return  # a prefill that is youngest waits for the others, keeping what it has
        step.add(request, num_tokens)

    def _start_over(self, request: Request, step: _Step) -> None:
        """Alone, and no room even with the reserve: mixed block sizes waste some. Start over, or give up for good."""
        if self.cache.can_ever_fit(request.num_tokens):
            self._preempt(request, step, may_park=False)
            self.cache.drop_idle()
        else:
            self._fail(request)

    @property
    def _num_active(self) -> int:
        return len(self._running) + len(self._loading)

    def _preempt(self, request: Request, step: _Step, *, may_park: bool = True) -> None:
        step.remove(request)
        step.preempted.append(request)
        self._running.remove(request)
        request.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        _insert(self._preempted, request)
        self.counters.preemptions += 1
        if may_park and self.cache.should_park(request):
            self.cache.park(request)
            self._blocked_at = None
            self.counters.swapped_out += 1
            self._events.emit(RequestParked(self._clock.now_ns(), request.request_id, request.num_computed_tokens))
        else:
            self._lose(request)

    def _lose(self, request: Request) -> None:
        """A preempted request has to compute its KV again."""
        lost = request.num_computed_tokens
        self._lost[request.request_id] = max(lost, self._lost.get(request.request_id, 0))
        self.cache.free(request)
        request.num_computed_tokens = 0
        self._blocked_at = None
        self._events.emit(RequestPreempted(self._clock.now_ns(), request.request_id, lost))

    def _lose_parked(self) -> bool:
        """Room is needed that parked requests hold and the host cannot take: the youngest of them loses its KV."""
        for request in reversed(self._preempted):
            if self.cache.is_parked_here(request):
                self._lose(request)
                self.counters.swap_fallbacks += 1
                return True
        return False

    def _stop_loading(self, request: Request) -> None:
        """Somebody else needs the room: back into the queue, with parked KV if it came from there."""
        self._loading.remove(request)
        self.cache.stop_load(request)
        if not self.cache.is_parked(request):
            request.num_computed_tokens = 0
        if request.num_preemptions:
            request.status = RequestStatus.PREEMPTED
            _insert(self._preempted, request)
        else:
            request.status = RequestStatus.WAITING
            self._waiting.appendleft(request)
        self._blocked_at = None

    def fail_load(self, request_id: str) -> None:
        """What a loading request waits for will not come: it computes that itself."""
        request = self._requests.get(request_id)
        if request is None or request.status is not RequestStatus.LOADING:
            return
        self._stop_loading(request)
        if self.cache.is_parked(request):
            self._lose(request)
            self.counters.swap_fallbacks += 1

    def _fail(self, request: Request) -> None:
        self._finish(request, FinishReason.ERROR)
        self._failed.append(request)

    def _admit_next(self, step: _Step) -> bool:
        """Start the queue's head if there is room for its whole prompt; False to stop trying in this step."""
        queue = self._preempted or self._waiting
        if not queue:
            return False
        request = queue[0]
        if not self.cache.can_ever_fit(max(self._most_tokens(request), request.num_tokens)):
            self._fail(request)  # settings changed while it waited
            return True
        state = (self.cache.room_version, self._num_active)
        if self._blocked_at == state and (self._num_active or self.cache.num_transfers):
            return False
        if self.cache.is_parked(request):
            return self._resume(request)
        is_idle = not self._num_active and not self.cache.num_transfers
        request.num_computed_tokens = self.cache.match_prefix(request)
        if self._fits(request):
            if self.cache.needs_load(request):
                if self.cache.begin_load(request):
                    self._take_from(queue)
                    self._wait_for_load(request, was_parked=False)
                    return True
                if is_idle:  # there will never be room for it as it is stored: compute it
                    self.cache.free(request)
                    request.num_computed_tokens = self.cache.match_prefix(request, on_device=True)
            if not self.cache.needs_load(request) and self._allocate_first(request, step):
                self._take_from(queue)
                self._start(request)
                return True
        self.cache.free(request)
        request.num_computed_tokens = 0
        if is_idle and self._lose_parked():
            return True
        # Read again: taking up and letting go of a prefix counts as new room.
        self._blocked_at = (self.cache.room_version, self._num_active)
        return False

    def _start(self, request: Request) -> None:
        """The request runs from now on, with its cached prefix or with what it had when it was parked."""
        resumed = request.num_preemptions > 0
        cached = request.num_computed_tokens
        request.status = RequestStatus.RUNNING
        _insert(self._running, request)
        now_ns = self._clock.now_ns()
        if request.first_scheduled_ns is None:
            request.first_scheduled_ns = now_ns
            request.num_cached_tokens = cached
            self.counters.requests_admitted += 1
            if request.cache.use_prefix_cache and request.params.prompt_logprobs is None:
                self.counters.prefix_cache_queries += len(request.prompt_ids)
                self.counters.prefix_cache_hits += cached
        self._events.emit(RequestAdmitted(now_ns, request.request_id, cached, resumed))

    def _resume(self, request: Request) -> bool:
        """Bring the head of the queue, which is parked, back; False to stop trying in this step."""
        is_idle = not self._num_active and not self.cache.num_transfers
        if is_idle:
            # Nothing will change by itself: what is cached must go, then younger ones' KV, then its own.
            self.cache.drop_idle()
        if self._fits(request) and self.cache.begin_load(request, use_reserve=is_idle):
            self._take_from(self._preempted)
            self._wait_for_load(request, was_parked=True)
            return True
        needed = sum(self.cache.missing_tokens(other) for other in (*self._running, *self._loading))
        if self.cache.begin_stream(request, self.cache.room_tokens() - needed):
            self._take_from(self._preempted)
            self._wait_for_load(request, was_parked=True)
            return True
        if is_idle:
            if not self._lose_parked():
                self._lose(request)
                self.counters.swap_fallbacks += 1
            return True
        self._blocked_at = (self.cache.room_version, self._num_active)
        return False

    def _wait_for_load(self, request: Request, *, was_parked: bool) -> None:
        request.status = RequestStatus.LOADING
        _insert(self._loading, request)
        self._events.emit(RequestLoading(self._clock.now_ns(), request.request_id, was_parked))

    @staticmethod
    def _take_from(queue: list[Request] | deque[Request]) -> None:
        if isinstance(queue, deque):
            queue.popleft()
        else:
            del queue[0]

    def _fits(self, request: Request) -> bool:
        """Whether all known tokens fit, besides what active requests still lack. Alone, trying is enough."""
        if not self._num_active:
            return True
        needed = sum(self.cache.missing_tokens(other) for other in (*self._running, *self._loading))
        return needed + self.cache.missing_tokens(request) <= self.cache.room_tokens()

    def _allocate_first(self, request: Request, step: _Step) -> bool:
        num_tokens = self._chunk(request, step)
        done = self.cache.allocate(request, num_tokens, end_pins=not self._running)
        if not done and not self._running:
            # Alone: what is cached must not stand in the way, not even the request's own prefix.
            self.cache.free(request)
            self.cache.drop_idle()
            request.num_computed_tokens = 0
            num_tokens = self._chunk(request, step)
            done = self.cache.allocate(request, num_tokens)
        if done:
            step.add(request, num_tokens)
        return done

    def _chunk(self, request: Request, step: _Step) -> int:
        most = min(_remaining(request), step.budget)
        return most if self._max_chunk is None else min(most, self._max_chunk)

    def _report(self, plan: StepPlan) -> None:
        decodes = sum(sequence.is_decode for sequence in plan.sequences)
        recoded = sum(batch.num_tokens for batch in plan.recodes)
        self._events.emit(
            StepScheduled(
                self._clock.now_ns(), decodes, plan.num_tokens - decodes, recoded, len(self._running), self.num_waiting
            )
        )

    # -- runs of decode steps (engine.decode_run) -----------------------------------------------------------------

    def steady(self) -> Sequence[Request]:
        """The running requests if the next step would decode them all and decide nothing, else none.

        None of them can stop before it has all its tokens.
        """
        running = self._running
        if not running or len(running) > self._max_batched or self._failed or not self.is_settled:
            return ()
        if self._loading or len(self.cache.pins):  # copies end and pins expire at times of their own
            return ()
        for request in running:
            params = request.params
            if _remaining(request) != 1 or not request.output_ids or params.stop_token_ids or params.max_tokens < 1:
                return ()
            if self._eos and not params.ignore_eos:
                return ()
        return running

    @property
    def is_settled(self) -> bool:
        """Whether the next plan would admit nobody, as long as running requests only decode."""
        if self._sync_recode:
            return False
        if not (self._preempted or self._waiting):
            return True
        running = len(self._running)
        if running >= self._max_seqs or running >= self._max_batched:
            return True
        return self._blocked_at == (self.cache.room_version, running)

    def plan_recodes(self) -> tuple[RecodeBatch, ...]:
        """What the step that is being run recodes; to be finished after its commits."""
        if not self.recodes:
            return ()
        return self.cache.plan_recodes(self._recode_tokens, in_step=True)

    @property
    def recodes(self) -> bool:
        """Whether the next plan might recode."""
        return self._recode_tokens > 0 and self.cache.has_recode_work()

    def tokens_left(self, request: Request) -> int:
        """Output tokens that a request will still get."""
        left = min(request.params.max_tokens - len(request.output_ids), self.max_model_len - request.num_tokens)
        return max(1, left)

    def complete(self, request: Request) -> None:
        """A running request has its last token."""
        self._finish(request, FinishReason.LENGTH)

    def report_decodes(self, number: int, recoded_tokens: int, stamp_ns: int) -> None:
        """One step of ``number`` decodes and no prefill was planned."""
        running, waiting = len(self._running), self.num_waiting
        self._events.emit(StepScheduled(stamp_ns, number, 0, recoded_tokens, running, waiting))

    # -- results --------------------------------------------------------------------------------------------------

    def update(self, plan: StepPlan, outputs: Sequence[SequenceOutput]) -> list[Request]:
        """Take the step's results: append tokens, commit KV, finish requests, swap recoded blocks.

        Returns the finished requests (those that failed in ``schedule`` too, which have no output). Outputs of requests
        that ended since are ignored; a sequence that should have sampled and has no token counts as not run. Calls
        ``cache.commit``, ``cache.free`` and ``cache.finish_recodes`` itself.
        """
        finished, self._failed = self._failed, []
        by_request = {id(output.request): output for output in outputs}
        counters = self.counters
        for sequence in plan.sequences:
            request = sequence.request
            output = by_request.get(id(request))
            if request.status is not RequestStatus.RUNNING or (sequence.samples and _has_no_token(output)):
                continue
            stop = sequence.start + sequence.num_tokens
            request.num_computed_tokens = stop
            if sequence.is_decode:
                counters.decode_tokens_computed += 1
            else:
                counters.prefill_tokens_computed += sequence.num_tokens
                prompt = len(request.prompt_ids)
                if sequence.start < prompt <= stop and self._lost.get(request.request_id, 0) < prompt:
                    counters.prompt_tokens += prompt
            if self._lost:
                self._count_recomputed(sequence, output)
            self.cache.commit(request, stop, output.mass if output is not None else None)
            reason = self._take_token(sequence, output)
            if reason is not None:
                self._finish(request, reason)
                finished.append(request)
        if plan.recodes:
            begin_ns = self._clock.now_ns()
            self.cache.finish_recodes(plan.recodes)
            counters.recode_time_ns += self._clock.now_ns() - begin_ns
        counters.steps += bool(plan.sequences)
        return finished

    def _take_token(self, sequence: ScheduledSequence, output: SequenceOutput | None) -> FinishReason | None:
        request, params = sequence.request, sequence.request.params
        if not sequence.samples:
            done = params.max_tokens == 0 and request.num_computed_tokens == request.num_tokens
            return FinishReason.LENGTH if done else None
        if output is None or output.token_id is None:
            return None  # unreachable: update leaves such a sequence alone
        token = output.token_id
        request.output_ids.append(token)
        now_ns = self._clock.now_ns()
        if request.first_token_ns is None:
            request.first_token_ns = now_ns
        request.last_token_ns = now_ns
        self.counters.generation_tokens += 1
        if token in params.stop_token_ids or (token in self._eos and not params.ignore_eos):
            return FinishReason.STOP
        if len(request.output_ids) >= params.max_tokens or request.num_tokens >= self.max_model_len:
            return FinishReason.LENGTH
        return None

    def _count_recomputed(self, sequence: ScheduledSequence, output: SequenceOutput | None) -> None:
        """Tokens computed once more after a preemption are counted, and their prompt log-probabilities not repeated."""
        request = sequence.request
        lost = self._lost.get(request.request_id)
        if lost is None:
            return
        again = max(0, min(sequence.start + sequence.num_tokens, lost) - sequence.start)
        request.num_recomputed_tokens += again
        self.counters.recomputed_tokens += again
        if output is not None and again:
            del output.prompt_logprobs[:again]

    def set_recode_budget(self, tokens: int) -> None:
        """``recode_tokens_per_step`` from now on."""
        self._recode_tokens = tokens

    def cancel(self, plan: StepPlan) -> None:
        """The executor failed on this plan: planned recodes are dropped and its sequences stay as they were."""
        self.cache.cancel_recodes(plan.recodes)

    def apply(self, values: TunableValues) -> None:
        """New settings for scheduler and cache, at a step boundary. Raises ValueError (nothing changed)."""
        max_batched, max_seqs = _limits(values)
        self.cache.apply(values)
        self._max_batched, self._max_seqs = max_batched, max_seqs
        changes = tuple((name, value) for name, value in values.items() if self._values.get(name) != value)
        self._values = dict(values)
        self._blocked_at = None
        if changes:
            self.counters.tunable_changes += len(changes)
            self._events.emit(TunablesApplied(self._clock.now_ns(), changes))

    # -- snapshots ------------------------------------------------------------------------------------------------

    def snapshot(self) -> Any:
        """A deep copy of all state, requests and cache included. Clock, events and counters are shared, not copied."""
        state = {name: value for name, value in self.__dict__.items() if name != "cache"}
        return copy.deepcopy(state, self._shared()), self.cache.snapshot()

    def restore(self, snapshot: Any) -> None:
        """Back to a snapshot, which stays reusable. Requests are then copies: ask ``running`` and ``waiting``."""
        state, cache = snapshot
        self.__dict__.update(copy.deepcopy(state, self._shared()))
        self.cache.restore(cache)

    def _shared(self) -> dict[int, Any]:
        return {id(part): part for part in (self._clock, self._events, self.counters)}


class _Step:
    """A plan in the making."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.preempted: list[Request] = []
        self._sequences: dict[str, ScheduledSequence] = {}

    def add(self, request: Request, num_tokens: int) -> None:
        start = request.num_computed_tokens
        samples = start + num_tokens == request.num_tokens and request.params.max_tokens > 0
        self._sequences[request.request_id] = ScheduledSequence(request, start, num_tokens, samples)
        self.budget -= num_tokens

    def remove(self, request: Request) -> None:
        sequence = self._sequences.pop(request.request_id, None)
        if sequence is not None:
            self.budget += sequence.num_tokens

    def ordered(self, cache: CacheManager) -> tuple[ScheduledSequence, ...]:
        """Decodes, then prefill chunks (a prompt's last token alone is one)."""
        planned = sorted(self._sequences.values(), key=lambda sequence: not sequence.is_decode)
        if cache.observes:
            for index, part in enumerate(planned):
                count = cache.observed_queries(part.request, part.start, part.start + part.num_tokens)
                planned[index] = replace(part, observed=count)
        return tuple(planned)


def _remaining(request: Request) -> int:
    return len(request.prompt_ids) + len(request.output_ids) - request.num_computed_tokens


def _has_no_token(output: SequenceOutput | None) -> bool:
    return output is None or output.token_id is None


def _insert(requests: list[Request], request: Request) -> None:
    """Keep a list in order of arrival; equal arrivals in the order they came."""
    index = len(requests)
    while index and requests[index - 1].arrival_ns > request.arrival_ns:
        index -= 1
    requests.insert(index, request)


def _limits(values: TunableValues) -> tuple[int, int]:
    return (
        int(parse_change("max_num_batched_tokens", values["max_num_batched_tokens"])),
        int(parse_change("max_num_seqs", values["max_num_seqs"])),
    )
