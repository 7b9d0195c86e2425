"""What to run next. Pure bookkeeping: returns plans, touches no tensor, reads time from the clock it is given.

One step's token budget goes to decodes first, then to prefills that are under way (:mod:`engine.step_planner`), then
to admissions (:mod:`engine.admitter`): preempted requests before new ones, each in order of arrival, never past one
that does not fit. (Orca's iteration-level batching and Sarathi's chunked prefill; preemption by recomputation as in
vLLM, or by parking KV in host memory: :mod:`engine.preemptor`.)

Nothing hangs: the oldest running request takes blocks from younger ones, so it always ends; a request that could not
even run alone is refused at admission, or ends in an error if the settings have changed since. A plan may be empty
while copies are under way: their end is the next thing that happens.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from engine.admission import AdmissionError, check_request
from engine.admitter import Admitter
from engine.cache_manager import CacheManager
from engine.clock import Clock
from engine.events import EventSink, NullSink, RequestAdded, RequestRejected, StepScheduled, TunablesApplied
from engine.finisher import Finisher
from engine.plan import RecodeBatch, SequenceOutput, StepPlan
from engine.preemptor import Preemptor
from engine.queues import Queues
from engine.request import FinishReason, Request
from engine.scheduler_part import Shared
from engine.stats import Counters
from engine.step_planner import StepPlanner, parse_limits
from engine.step_results import StepResults
from engine.tunables import TunableValues

# Some plans are empty, after a preemption say, but not many in a row: something always moves. Should that be wrong,
# whoever steps lets requests fail instead of waiting for ever.
MOST_EMPTY_STEPS = 16


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
        self._values = dict(values)
        self._queues = queues = Queues()
        shared = Shared(queues, cache, clock, self.counters, self._events)
        self._finisher = finisher = Finisher(shared)
        self._preemptor = Preemptor(shared)
        admitter = Admitter(shared, self._preemptor, finisher, max_model_len=max_model_len)
        self._planner = StepPlanner(
            queues,
            cache,
            self._preemptor,
            admitter,
            finisher,
            limits=parse_limits(values),
            max_chunk_tokens=max_chunk_tokens,
        )
        self._results = StepResults(shared, finisher, max_model_len=max_model_len, eos_token_ids=eos_token_ids)

    # -- requests -------------------------------------------------------------------------------------------------

    @property
    def running(self) -> Sequence[Request]:
        """Requests that hold KV, oldest arrival first."""
        return self._queues.running

    @property
    def waiting(self) -> Sequence[Request]:
        """Requests that do not run: loading ones, then in the order they will be admitted, preempted ones first."""
        queues = self._queues
        return [*queues.loading, *queues.preempted, *queues.waiting]

    @property
    def loading(self) -> Sequence[Request]:
        """Requests that wait for KV from the host, oldest arrival first."""
        return self._queues.loading

    @property
    def num_parked(self) -> int:
        """Preempted requests that keep their KV."""
        return sum(self.cache.is_parked(request) for request in self._queues.preempted)

    @property
    def num_waiting(self) -> int:
        return self._queues.num_waiting

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything: requests, failures to report, recodes if they are the plans' business."""
        recodes = self._sync_recode or self._recode_tokens > 0
        return bool(self._queues.requests or self._finisher.failed) or (recodes and self._has_recode_work())

    def get(self, request_id: str) -> Request | None:
        """The request of that id, if it is waiting or running."""
        return self._queues.requests.get(request_id)

    def add(self, request: Request) -> None:
        """Queue a request. Raises AdmissionError (nothing kept): what it says is for the user."""
        self.counters.requests_offered += 1
        self.counters.offered_prompt_tokens += len(request.prompt_ids)
        try:
            limits = {"max_model_len": self.max_model_len, "max_waiting": self.max_waiting}
            check_request(request, self._queues, self.cache, **limits)
        except AdmissionError as error:
            self.counters.requests_rejected += 1
            self._events.emit(RequestRejected(self._clock.now_ns(), request.request_id, error.kind))
            raise
        self._queues.requests[request.request_id] = request
        self._queues.waiting.append(request)
        self._events.emit(RequestAdded(self._clock.now_ns(), request.request_id, len(request.prompt_ids)))

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> Request | None:
        """End a request at any point, also between ``schedule`` and ``update``; its KV is freed at once.

        Returns it (status FINISHED), or None when it is unknown or has finished already. Not reported by ``update``.
        """
        request = self._queues.requests.get(request_id)
        if request is not None:
            self._finisher.finish(request, reason)
        return request

    # -- planning -------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """The next step, with slots allocated and recodes planned. Every plan, empty ones too, goes to ``update``."""
        self.cache.pins.expire()
        draft = self._planner.plan()
        recodes: tuple[RecodeBatch, ...] = ()
        if self._sync_recode or self._recode_tokens:
            begin_ns = self._clock.now_ns()
            recodes = self._plan_recodes(sync=self._sync_recode)
            self.counters.recode_time_ns += self._clock.now_ns() - begin_ns
        plan = StepPlan(draft.ordered(self.cache), recodes, tuple(draft.preempted))
        if not plan.is_empty and not self.is_silent:
            self._report(plan)
        return plan

    def fail_load(self, request_id: str) -> None:
        """What a loading request waits for will not come: it computes that itself."""
        self._preemptor.fail_load(request_id)

    def _report(self, plan: StepPlan) -> None:
        decodes = sum(sequence.is_decode for sequence in plan.sequences)
        recoded = sum(batch.num_tokens for batch in plan.recodes)
        self._report_step(self._clock.now_ns(), decodes, plan.num_tokens - decodes, recoded)

    def _report_step(self, stamp_ns: int, decodes: int, prefill_tokens: int, recoded_tokens: int) -> None:
        running, waiting = len(self._queues.running), self._queues.num_waiting
        self._events.emit(StepScheduled(stamp_ns, decodes, prefill_tokens, recoded_tokens, running, waiting))

    # -- runs of decode steps (engine.decode_run) -----------------------------------------------------------------

    def steady(self) -> Sequence[Request]:
        """The running requests if the next step would decode them all and decide nothing, else none.

        None of them can stop before it has all its tokens.
        """
        if self._sync_recode or not self._planner.is_steady():
            return ()
        running = self._queues.running
        for request in running:
            params = request.params
            if request.num_uncomputed_tokens != 1 or not request.output_ids:
                return ()
            if params.stop_token_ids or params.max_tokens < 1:
                return ()
            if self._eos and not params.ignore_eos:
                return ()
        return running

    @property
    def is_settled(self) -> bool:
        """Whether the next plan would admit nobody, as long as running requests only decode."""
        return not self._sync_recode and self._planner.is_settled

    def plan_recodes(self) -> tuple[RecodeBatch, ...]:
        """What the step that is being run recodes; to be finished after its commits."""
        if not self.recodes:
            return ()
        return self._plan_recodes(sync=False)

    def _plan_recodes(self, *, sync: bool) -> tuple[RecodeBatch, ...]:
        wanted = self._planner.wanted_tokens
        return self.cache.plan_recodes(self._recode_tokens, sync=sync, in_step=True, wanted_tokens=wanted)

    def _has_recode_work(self) -> bool:
        return self.cache.has_recode_work(self._planner.wanted_tokens)

    @property
    def recodes(self) -> bool:
        """Whether the next plan might recode."""
        return self._recode_tokens > 0 and self._has_recode_work()

    def tokens_left(self, request: Request) -> int:
        """Output tokens that a request will still get."""
        left = min(request.params.max_tokens - len(request.output_ids), self.max_model_len - request.num_tokens)
        return max(1, left)

    def complete(self, request: Request) -> None:
        """A running request has its last token."""
        self._finisher.finish(request, FinishReason.LENGTH)

    def report_decodes(self, number: int, recoded_tokens: int, stamp_ns: int) -> None:
        """One step of ``number`` decodes and no prefill was planned."""
        self._report_step(stamp_ns, number, 0, recoded_tokens)

    # -- results --------------------------------------------------------------------------------------------------

    def update(self, plan: StepPlan, outputs: Sequence[SequenceOutput]) -> list[Request]:
        """Take the step's results: append tokens, commit KV, finish requests, swap recoded blocks.

        Returns the finished requests (those that failed in ``schedule`` too, which have no output). Outputs of requests
        that ended since are ignored; a sequence that should have sampled and has no token counts as not run. Calls
        ``cache.commit``, ``cache.free`` and ``cache.finish_recodes`` itself.
        """
        finished = self._finisher.take_failed()
        finished += self._results.take(plan.sequences, outputs)
        counters = self.counters
        if plan.recodes:
            begin_ns = self._clock.now_ns()
            self.cache.finish_recodes(plan.recodes)
            counters.recode_time_ns += self._clock.now_ns() - begin_ns
        counters.steps += bool(plan.sequences)
        return finished

    def set_recode_budget(self, tokens: int) -> None:
        """``recode_tokens_per_step`` from now on."""
        self._recode_tokens = tokens

    def cancel(self, plan: StepPlan) -> None:
        """The executor failed on this plan: planned recodes are dropped and its sequences stay as they were."""
        self.cache.cancel_recodes(plan.recodes)

    def apply(self, values: TunableValues) -> None:
        """New settings for scheduler and cache, at a step boundary. Raises ValueError (nothing changed)."""
        limits = parse_limits(values)
        self.cache.apply(values)
        self._planner.max_batched, self._planner.max_seqs = limits
        changes = tuple((name, value) for name, value in values.items() if self._values.get(name) != value)
        self._values = dict(values)
        self._queues.blocked_at = None
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
        return {id(part): part for part in (self.cache, self._clock, self._events, self.counters)}
