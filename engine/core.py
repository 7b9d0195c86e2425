"""The step loop: schedule, recode, execute, account. One thread calls it; it has no thread, queue or socket itself.

A step boundary is the only place where anything changes from outside: requests come and go and tunables take effect
between two calls of :meth:`EngineCore.step`. The same loop runs under a virtual clock with a latency model in place of
the runner. No torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from engine.clock import Clock
from engine.core_stats import CoreStats, Distributions, LiveRequest
from engine.decode_run import DecodeRun, Pace
from engine.plan import RecodeBatch, SequenceOutput, StepPlan, TokenLogprobs
from engine.readings import progress, read_gauges
from engine.recode_pacer import RecodePacer
from engine.request import FinishReason, Request
from engine.scheduler import AdmissionError, Scheduler
from engine.stats import EngineStats, Gauges, Histogram
from engine.tunable_state import REJECTED, KnobOutcome, Patch, PatchOutcome, TunableState, Veto
from engine.tunables import TunableValues

if TYPE_CHECKING:
    from engine.cache_manager import CacheManager
    from engine.link_times import Mover

_log = logging.getLogger(__name__)

# The scheduler promises that something always moves. Should it be wrong, requests fail instead of waiting for ever.
_STUCK_STEPS = 16
_RETRY_S = 0.002  # pause after an empty plan: waiting for recodes to free room
# A runner that fails this often in a row is broken, not unlucky: a lost device fails every step.
_BROKEN_AFTER_FAILURES = 5


class StepWork(Protocol):
    """KV bytes that attention covered in the last step, and that it wrote; how many of the former were streamed from
    the host, and how long computing waited for these.
    """

    @property
    def kv_bytes_read(self) -> int: ...

    @property
    def kv_bytes_written(self) -> int: ...

    @property
    def host_bytes_read(self) -> int: ...

    @property
    def host_wait_ns(self) -> int: ...


class Runner(Protocol):
    """Carries plans out: the model, or a latency model. ``execute`` returns when its tokens are known."""

    @property
    def last_work(self) -> StepWork: ...

    def recode(self, batches: Sequence[RecodeBatch]) -> None: ...

    def execute(self, plan: StepPlan, cache: CacheManager) -> list[SequenceOutput]: ...


@dataclass(slots=True)
class RequestDelta:
    """What one step did for one request; a copy, so that other threads may read it.

    ``num_evicted_tokens``: so far. ``finish_reason`` comes with the last delta of a request and only then. ``error`` is
    for people.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    num_evicted_tokens: int = 0


@dataclass(frozen=True)
class CoreOptions:
    """Fixed for the life of an engine. ``idle_recode_tokens``: KV recoded at a time while nothing runs; commands are
    taken in between. ``recode_share``: of a step's time that recoding may take while requests run; 0 leaves the
    scheduler's own budget alone.
    """

    model: str
    instance: str
    max_model_len: int
    idle_recode_tokens: int = 2048
    recode_share: float = 0.0


class EngineCore:
    """One engine. Not thread-safe: every method is called from the thread that steps."""

    def __init__(
        self,
        scheduler: Scheduler,
        cache: CacheManager,
        runner: Runner,
        values: TunableValues,
        clock: Clock,
        *,
        options: CoreOptions,
        stats: CoreStats,
        probe: Callable[[Gauges], None] | None = None,
        veto: Veto | None = None,
        mover: Mover | None = None,
    ) -> None:
        """``probe`` fills in gauges of the process and device (memory, bandwidth) when stats are read. ``veto`` may
        refuse a change of a tunable. ``mover`` copies between device and host memory, if the cache has a host tier.
        """
        self._scheduler = scheduler
        self._cache = cache
        self._runner = runner
        self._clock = clock
        self._options = options
        self._stats = stats
        self._probe = probe
        self._mover = mover
        self._tunables = TunableState(values, clock.now_ns(), veto)
        self._live: dict[str, LiveRequest] = {}
        self._stuck_steps = 0
        self._was_empty = False  # the last plan, although requests wait
        self._failures_in_a_row = 0
        self._recode_due = True
        self._pacer = RecodePacer(options.recode_share) if options.recode_share else None
        self.broken: str | None = None  # why no step will be tried again

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    @property
    def has_background_work(self) -> bool:
        """Whether :meth:`background` may still find something to recode, or to copy between the tiers."""
        return self.broken is None and (self._may_recode or self._may_copy)

    @property
    def _may_recode(self) -> bool:
        return self._recode_due and self._cache.has_recode_work()

    @property
    def _may_copy(self) -> bool:
        return self._mover is not None and (self._cache.num_transfers > 0 or self._cache.has_transfer_plans())

    @property
    def pause_s(self) -> float | None:
        """How long there is nothing to do, unless a command comes: 0 is to go on at once, None is until one comes."""
        if self.broken is not None or not (self._live or self.has_background_work):
            return None
        if self._was_empty if self._live else not self._may_recode:
            copying = self._mover is not None and self._cache.num_transfers > 0
            if copying and self._mover is not None:
                return self._mover.wait_ns() / 1e9
            return _RETRY_S if self._live else 0.0
        return 0.0

    # Requests

    def add(self, request: Request) -> None:
        """Queue a request. Counted as offered whatever becomes of it.

        Raises AdmissionError when it can never run or the queue is full, ValueError for an id that is in use.
        """
        self._stats.offered(request)
        if self.broken is not None:
            self._stats.counters.requests_offered += 1
            self._stats.counters.requests_rejected += 1
            raise AdmissionError("engine_broken", f"the engine has stopped: {self.broken}")
        if request.request_id in self._live:
            raise ValueError(f"request id {request.request_id!r} is in use")
        self._scheduler.add(request)
        self._live[request.request_id] = LiveRequest(request)
        self._recode_due = True

    def abort(self, request_id: str) -> bool:
        """Give up a request and free what it holds; False when there is none of that id (any more)."""
        return self._end(request_id, FinishReason.ABORT)

    def finish(self, request_id: str) -> bool:
        """End a request as complete, because its text reached a stop string."""
        return self._end(request_id, FinishReason.STOP)

    def abort_all(self) -> list[RequestDelta]:
        """End every request, with a delta for each."""
        message = "the engine is shutting down"
        return [self._fail(request_id, message, FinishReason.ABORT) for request_id in [*self._live]]

    def feedback(self, score: float) -> None:
        """A user's satisfaction with one answer, 0 to 1."""
        self._stats.counters.feedback_count += 1
        self._stats.counters.feedback_sum += score

    # Stepping

    def step(self) -> list[RequestDelta]:
        """Run one step. Never raises: a failing step ends the requests in it with an error and the rest live on."""
        if self.broken is not None or not self._live:
            return []
        begin_ns, recoded_ns = self._clock.now_ns(), self._stats.counters.recode_time_ns
        self._was_empty = False
        if self._pacer is not None:
            self._scheduler.set_recode_budget(self._pacer.budget_tokens())
        try:
            self._receive()
            plan = self._scheduler.schedule()
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine must go on
            _log.exception("scheduling failed")
            return self._fail_step(StepPlan(), [*self._live], error)
        self._send()
        plan = self._recoded(plan)
        if plan.is_empty:
            self._was_empty = True
            return self._resolve_stuck(plan)
        self._stuck_steps = 0
        return self._execute(plan, begin_ns, recoded_ns)

    def run_decodes(self, pace: Pace, until_ns: int) -> Sequence[Request]:
        """Simulation's way through steps that would only decode: as many of them at once as need no decision.

        Leaves everything as :meth:`step` would, called until the clock has reached ``until_ns``, and returns the
        requests that ended. Where a decision is due at once nothing happens: then step.
        """
        if self.broken is not None or not self._cache.is_host_asleep:
            return ()
        if self._pacer is not None:
            self._scheduler.set_recode_budget(self._pacer.budget_tokens())
        requests = self._scheduler.steady()
        if not requests:
            return ()
        run = DecodeRun(self._scheduler, requests, self._live, self._stats, pace, self._clock, self._pacer)
        run.run(until_ns)
        for request in run.finished:
            del self._live[request.request_id]
        if run.done:
            self._recode_due = True
            self._stuck_steps = self._failures_in_a_row = 0
            self._was_empty = False
        return run.finished

    def background(self) -> None:
        """Recode and copy while no request runs; ``has_background_work`` tells afterwards whether there is more."""
        try:
            self._receive()
            batches = self._cache.plan_recodes(self._options.idle_recode_tokens)
        except Exception as error:  # noqa: BLE001 - nothing is lost but the recoding
            _log.exception("planning a recode failed")
            self._recode_due = False
            self._count_failure(error)
            return
        plan = self._recoded(StepPlan(recodes=batches))
        self._recode_due = bool(plan.recodes)
        self._cache.finish_recodes(plan.recodes)
        self._send()

    def _receive(self) -> None:
        """Take what has been copied between the tiers since."""
        numbers = self._mover.arrived() if self._mover is not None else []
        if numbers:
            self._cache.finish_transfers(numbers)
            self._recode_due = True

    def _send(self) -> None:
        """Start copies between the tiers. If that fails, the tier is switched off, and whoever waits for it computes
        its KV itself.
        """
        if self._mover is None:
            return
        transfers = self._cache.plan_transfers()
        try:
            self._mover.submit(transfers)
        except Exception:  # noqa: BLE001 - nothing is lost but the copies
            _log.exception("copying between device and host failed; host_offload stops")
            for request_id in self._cache.cancel_transfers([transfer.number for transfer in transfers]):
                self._scheduler.fail_load(request_id)
            self._cache.stop_offload()

    def _recoded(self, plan: StepPlan) -> StepPlan:
        """Run the plan's recodes. If that fails the plan goes on without them: the old storage is still in place."""
        if not plan.recodes:
            return plan
        begin_ns = self._clock.now_ns()
        try:
            self._runner.recode(plan.recodes)
        except Exception as error:  # noqa: BLE001 - nothing is lost but the recoding
            _log.exception("recoding failed")
            self._cache.cancel_recodes(plan.recodes)
            self._count_failure(error)
            return replace(plan, recodes=())
        self._stats.counters.recode_time_ns += self._clock.now_ns() - begin_ns
        return plan

    def _execute(self, plan: StepPlan, begin_ns: int, recoded_ns: int) -> list[RequestDelta]:
        """``begin_ns``, ``recoded_ns``: the time, and the time spent recoding so far, when the step began.

        Recoding has a time of its own: the step's begins so much later.
        """
        counters = self._stats.counters
        scheduled_ns = begin_ns + counters.recode_time_ns - recoded_ns
        live = [self._live[sequence.request.request_id] for sequence in plan.sequences]
        for record in live:
            if not record.is_scheduled:
                self._stats.scheduled(record, scheduled_ns)
        try:
            outputs = self._runner.execute(plan, self._cache) if plan.sequences else []
            now_ns = self._clock.now_ns()
            finished = self._scheduler.update(plan, outputs)
        except Exception as error:  # noqa: BLE001 - whatever it is, only its requests may suffer
            _log.exception("a step of %d sequences failed", len(plan.sequences))
            return self._fail_step(plan, [record.request.request_id for record in live], error)
        self._recode_due = True
        deltas = self._deltas(outputs, finished, now_ns)
        if plan.sequences:
            self._failures_in_a_row = 0
            recode_ns = counters.recode_time_ns - recoded_ns
            step_ns = self._clock.now_ns() - begin_ns - recode_ns
            self._stats.step(plan, live, step_ns)
            if self._pacer is not None:
                tokens = max((batch.num_tokens for batch in plan.recodes), default=0)
                self._pacer.observe(step_ns, recode_ns, tokens)
            work = self._runner.last_work
            counters.kv_bytes_read += work.kv_bytes_read
            counters.kv_bytes_written += work.kv_bytes_written
            if work.host_bytes_read:
                self._cache.note_streamed(work.host_bytes_read, work.host_wait_ns)
        return deltas

    def _deltas(
        self, outputs: Sequence[SequenceOutput], finished: Sequence[Request], now_ns: int
    ) -> list[RequestDelta]:
        ended = set(finished)
        deltas = []
        for output in outputs:
            request = output.request
            record = self._live.get(request.request_id)
            if record is None:
                continue
            if output.token_id is not None:
                self._stats.token(record, now_ns)
            reason = None
            if request in ended:
                ended.discard(request)
                del self._live[request.request_id]
                reason = request.finish_reason
                self._stats.completed(request, now_ns)
            elif output.token_id is None and not output.prompt_logprobs:
                continue
            deltas.append(
                RequestDelta(
                    request.request_id,
                    () if output.token_id is None else (output.token_id,),
                    () if output.logprobs is None else (output.logprobs,),
                    tuple(output.prompt_logprobs),
                    request.num_cached_tokens,
                    reason,
                    num_evicted_tokens=request.num_evicted_tokens,
                )
            )
        return deltas + self._unfit(ended)

    def _unfit(self, requests: Collection[Request]) -> list[RequestDelta]:
        """Requests that the scheduler gave up while planning: settings changed, and they fit no longer (case G.24)."""
        for request in requests:
            self._live.pop(request.request_id, None)
        message = "the KV pool has no room for this request any more; shorten it, or enlarge the pool"
        return [
            RequestDelta(request.request_id, finish_reason=FinishReason.ERROR, error=message) for request in requests
        ]

    # Failure

    def _end(self, request_id: str, reason: FinishReason) -> bool:
        record = self._live.pop(request_id, None)
        if record is None:
            return False
        try:
            self._scheduler.abort(request_id, reason)
        except Exception as error:  # noqa: BLE001 - bookkeeping is beyond repair, and clients must hear of it
            _log.exception("freeing request %s failed", request_id)
            self.broken = self.broken or f"{type(error).__name__}: {error}"
        self._recode_due = True
        if reason is FinishReason.STOP:
            self._stats.completed(record.request, self._clock.now_ns())
        return True

    def _fail(self, request_id: str, error: str, reason: FinishReason = FinishReason.ERROR) -> RequestDelta:
        self._end(request_id, reason)
        return RequestDelta(request_id, finish_reason=reason, error=error)

    def _fail_step(self, plan: StepPlan, request_ids: Sequence[str], error: Exception) -> list[RequestDelta]:
        message = f"the step that computed this request failed: {type(error).__name__}: {error}"
        deltas = [self._fail(request_id, message) for request_id in request_ids]
        self._count_failure(error)
        try:
            self._scheduler.cancel(plan)
            deltas += self._unfit(self._scheduler.update(StepPlan(), []))
        except Exception as second:  # noqa: BLE001 - bookkeeping is beyond repair, and clients must hear of it
            _log.exception("cleaning up after a failed step failed")
            self.broken = self.broken or f"{type(second).__name__}: {second}"
        if self.broken is not None:
            deltas += [self._fail(request_id, f"the engine has stopped: {self.broken}") for request_id in [*self._live]]
        return deltas

    def _count_failure(self, error: Exception) -> None:
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= _BROKEN_AFTER_FAILURES and self.broken is None:
            self.broken = f"{self._failures_in_a_row} steps in a row failed, last with {type(error).__name__}: {error}"
            _log.error("engine stopped: %s", self.broken)

    def _resolve_stuck(self, plan: StepPlan) -> list[RequestDelta]:
        """An empty plan. Some are (after a preemption, say), but not many in a row."""
        deltas = self._unfit(self._scheduler.update(plan, []))
        self._stuck_steps = 0 if deltas or self._cache.num_transfers else self._stuck_steps + 1
        if self._stuck_steps < _STUCK_STEPS or not self._live:
            return deltas
        self._stuck_steps = 0
        first = next(iter(self._live))
        _log.error("nothing can be scheduled of %d requests; failing %s", len(self._live), first)
        return [self._fail(first, "the KV pool has no room for this request: shorten it or enlarge the pool")]

    # Tunables

    def patch(self, patch: Patch) -> PatchOutcome:
        """Change tunables at this step boundary; all named knobs or none. Repeating a patch changes nothing."""
        refusal = self._tunables.refusal(patch)
        if refusal is not None:
            return refusal
        changed = self._tunables.changed_values(patch)
        if changed:
            try:
                self._scheduler.apply({**self._tunables.desired, **changed})
            except ValueError as error:
                outcome = KnobOutcome(REJECTED, str(error))
                return self._tunables.rejected(patch, dict.fromkeys(changed, outcome))
            self._recode_due = True
        self._tunables.commit(patch, self._clock.now_ns())
        results = {name: progress(name, self._tunables.desired[name], self._scheduler) for name in patch.changes}
        return PatchOutcome(self._tunables.revision, results)

    def tunables_json(self) -> dict[str, Any]:
        """The answer of ``GET /v1/tunables``."""
        state = self._tunables
        gauges = read_gauges(self._scheduler)
        return {
            "instance": self._options.instance,
            "revision": state.revision,
            "desired": dict(state.desired),
            "effective": dict(state.effective),
            "writers": {name: vars(record).copy() for name, record in state.writers.items()},
            "progress": {
                "resident": [vars(row).copy() for row in gauges.resident],
                "converged_fraction": gauges.converged_fraction,
                "held_below_format_bytes": gauges.held_below_format_bytes,
            },
        }

    # Readings

    def stats(self) -> EngineStats:
        """A reading of the engine; a copy."""
        recorded = self._stats
        gauges = read_gauges(self._scheduler)
        if self._probe is not None:
            self._probe(gauges)
        return EngineStats(
            instance=self._options.instance,
            model=self._options.model,
            stamp_ns=self._clock.now_ns(),
            max_model_len=self._options.max_model_len,
            max_num_seqs=int(self._tunables.effective["max_num_seqs"]),
            revision=self._tunables.revision,
            effective=dict(self._tunables.effective),
            counters=replace(recorded.counters),
            gauges=gauges,
            **{
                name: Histogram(list(histogram.counts), histogram.sum_s)
                for name, histogram in (
                    ("ttft", recorded.ttft),
                    ("itl", recorded.itl),
                    ("e2e", recorded.e2e),
                    ("queue", recorded.queue),
                    ("prompt_lengths", recorded.prompt_lengths),
                    ("output_lengths", recorded.output_lengths),
                )
            },
        )

    def distributions(self) -> Distributions:
        """The metrics page's histograms; a copy."""
        return replace(self._stats.distributions, blocks=self._cache.lives).copy()

    # Pinned prefixes

    def pins_json(self) -> dict[str, Any]:
        """The answer of ``GET /v1/pins``."""
        pins = self._cache.pins
        pins.expire()
        return {"pins": pins.to_json(), "bytes": pins.num_bytes(), "max_bytes": pins.max_bytes}

    def unpin(self, pin_id: int | None) -> int:
        """End one pin, or all; returns how many that were. What they kept stays cached until room is needed."""
        self._recode_due = True
        return self._cache.pins.unpin(pin_id)
