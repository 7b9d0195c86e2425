"""The step loop: schedule, recode, execute, account. One thread calls it; it has no thread, queue or socket itself.

A step boundary is the only place where anything changes from outside: requests come and go and tunables take effect
between two calls of :meth:`EngineCore.step`. The same loop runs under a virtual clock with a latency model in place of
the runner. No torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from engine.admission import AdmissionError
from engine.clock import Clock
from engine.core_copies import TierCopies
from engine.core_failures import Failures
from engine.core_options import CoreOptions
from engine.core_stats import CoreStats, Distributions, LiveRequest
from engine.decode_run import DecodeRun, Pace
from engine.live_requests import LiveRequests
from engine.plan import StepPlan
from engine.readings import audit_json, progress, read_gauges, read_stats, tunables_json
from engine.recode_pacer import RecodePacer
from engine.request import FinishReason, Request
from engine.request_delta import RequestDelta
from engine.runner import Runner
from engine.scheduler import MOST_EMPTY_STEPS, Scheduler
from engine.stats import EngineStats, Gauges
from engine.tunable_state import REJECTED, KnobOutcome, Patch, PatchOutcome, TunableState, Veto
from engine.tunables import TunableValues

if TYPE_CHECKING:
    from engine.cache_manager import CacheManager
    from engine.link_times import Mover

_log = logging.getLogger(__name__)

_RETRY_S = 0.002  # pause after an empty plan: waiting for recodes to free room


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
        self._copies = TierCopies(scheduler, mover)
        self._tunables = TunableState(values, clock.now_ns(), veto)
        self._failures = Failures()
        self._live = LiveRequests(scheduler, stats, clock, self._failures)
        self._stuck_steps = 0
        self._was_empty = False  # the last plan, although requests wait
        self._recode_due = True
        self._pacer = RecodePacer(options.recode_share) if options.recode_share else None

    @property
    def broken(self) -> str | None:
        """Why no step will be tried again; None while all is well."""
        return self._failures.broken

    def give_up(self, why: str | Exception) -> None:
        """Try no further step. The first reason stays."""
        self._failures.give_up(why)

    @property
    def has_work(self) -> bool:
        return bool(self._live.by_id)

    @property
    def has_background_work(self) -> bool:
        """Whether :meth:`background` may still find something to recode, or to copy between the tiers."""
        return self.broken is None and (self._may_recode or self._copies.may_copy)

    @property
    def _may_recode(self) -> bool:
        return self._recode_due and self._cache.has_recode_work()

    @property
    def pause_s(self) -> float | None:
        """How long there is nothing to do, unless a command comes: 0 is to go on at once, None is until one comes."""
        live = self._live.by_id
        if self.broken is not None or not (live or self.has_background_work):
            return None
        if self._was_empty if live else not self._may_recode:
            wait_ns = self._copies.wait_ns
            if wait_ns is not None:
                return wait_ns / 1e9
            return _RETRY_S if live else 0.0
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
        if request.request_id in self._live.by_id:
            raise ValueError(f"request id {request.request_id!r} is in use")
        self._scheduler.add(request)
        self._live.by_id[request.request_id] = LiveRequest(request)
        self._recode_due = True

    def abort(self, request_id: str) -> bool:
        """Give up a request and free what it holds; False when there is none of that id (any more)."""
        return self._end(request_id, FinishReason.ABORT)

    def finish(self, request_id: str) -> bool:
        """End a request as complete, because its text reached a stop string."""
        return self._end(request_id, FinishReason.STOP)

    def abort_all(self) -> list[RequestDelta]:
        """End every request, with a delta for each."""
        return self._fail([*self._live.by_id], "the engine is shutting down", FinishReason.ABORT)

    def _end(self, request_id: str, reason: FinishReason) -> bool:
        is_ended = self._live.end(request_id, reason)
        self._recode_due |= is_ended
        return is_ended

    def _fail(
        self, request_ids: Sequence[str], error: str, reason: FinishReason = FinishReason.ERROR
    ) -> list[RequestDelta]:
        self._recode_due |= bool(request_ids)
        return self._live.fail(request_ids, error, reason)

    def feedback(self, score: float) -> None:
        """A user's satisfaction with one answer, 0 to 1."""
        self._stats.counters.feedback_count += 1
        self._stats.counters.feedback_sum += score

    # Stepping

    def step(self) -> list[RequestDelta]:
        """Run one step. Never raises: a failing step ends the requests in it with an error and the rest live on."""
        if self.broken is not None or not self._live.by_id:
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
            return self._fail_step(StepPlan(), [*self._live.by_id], error)
        self._copies.send()
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
        if self._failures.broken is not None or not self._cache.is_host_asleep:
            return ()
        if self._pacer is not None:
            self._scheduler.set_recode_budget(self._pacer.budget_tokens())
        requests = self._scheduler.steady()
        if not requests or any(map(self._cache.may_observe, requests)):
            return ()  # a run reports no attention
        run = DecodeRun(self._scheduler, requests, self._live.by_id, self._stats, pace, self._clock, self._pacer)
        run.run(until_ns)
        for request in run.finished:
            del self._live.by_id[request.request_id]
        if run.done:
            self._recode_due = True
            self._failures.reset()
            self._stuck_steps = 0
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
            self._failures.count(error)
            return
        plan = self._recoded(StepPlan(recodes=batches))
        self._recode_due = bool(plan.recodes)
        self._cache.finish_recodes(plan.recodes)
        self._copies.send()

    def _receive(self) -> None:
        """Take what has been copied between the tiers since."""
        self._recode_due |= self._copies.receive()

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
            self._failures.count(error)
            return replace(plan, recodes=())
        self._stats.counters.recode_time_ns += self._clock.now_ns() - begin_ns
        return plan

    def _execute(self, plan: StepPlan, begin_ns: int, recoded_ns: int) -> list[RequestDelta]:
        """``begin_ns``, ``recoded_ns``: the time, and the time spent recoding so far, when the step began.

        Recoding has a time of its own: the step's begins so much later.
        """
        counters = self._stats.counters
        scheduled_ns = begin_ns + counters.recode_time_ns - recoded_ns
        live = [self._live.by_id[sequence.request.request_id] for sequence in plan.sequences]
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
        deltas = self._live.deltas(outputs, finished, now_ns)
        if plan.sequences:
            self._failures.reset()
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

    # Failure

    def _fail_step(self, plan: StepPlan, request_ids: Sequence[str], error: Exception) -> list[RequestDelta]:
        message = f"the step that computed this request failed: {type(error).__name__}: {error}"
        deltas = self._fail(request_ids, message)
        self._failures.count(error)
        try:
            self._scheduler.cancel(plan)
            deltas += self._live.unfit(self._scheduler.update(StepPlan(), []))
        except Exception as second:  # noqa: BLE001 - bookkeeping is beyond repair, and clients must hear of it
            _log.exception("cleaning up after a failed step failed")
            self.give_up(second)
        if self.broken is not None:
            deltas += self._fail([*self._live.by_id], f"the engine has stopped: {self.broken}")
        return deltas

    def _resolve_stuck(self, plan: StepPlan) -> list[RequestDelta]:
        """An empty plan. Some are (after a preemption, say), but not many in a row."""
        live = self._live.by_id
        deltas = self._live.unfit(self._scheduler.update(plan, []))
        self._stuck_steps = 0 if deltas or self._cache.num_transfers else self._stuck_steps + 1
        if self._stuck_steps < MOST_EMPTY_STEPS or not live:
            return deltas
        self._stuck_steps = 0
        first = next(iter(live))
        _log.error("nothing can be scheduled of %d requests; failing %s", len(live), first)
        return self._fail([first], "the KV pool has no room for this request: shorten it or enlarge the pool")

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
        return tunables_json(self._options.instance, self._tunables, read_gauges(self._scheduler))

    # Readings

    def stats(self) -> EngineStats:
        """A reading of the engine; a copy."""
        gauges = read_gauges(self._scheduler)
        if self._probe is not None:
            self._probe(gauges)
        return read_stats(self._options, self._tunables, self._stats, gauges, self._clock.now_ns())

    def distributions(self) -> Distributions:
        """The metrics page's histograms; a copy."""
        return replace(self._stats.distributions, blocks=self._cache.lives).copy()

    # Pinned prefixes

    def pins_json(self) -> dict[str, Any]:
        """The answer of ``GET /v1/pins``."""
        pins = self._cache.pins
        pins.expire()
        return {"pins": pins.to_json(), "bytes": pins.num_bytes(), "max_bytes": pins.max_bytes}

    def audit_json(self) -> dict[str, Any]:
        """The answer of ``GET /v1/audit``. O(everything that is cached): nothing else happens meanwhile."""
        return audit_json(self._cache, self._clock)

    def unpin(self, pin_id: int | None) -> int:
        """End one pin, or all; returns how many that were. What they kept stays cached until room is needed."""
        self._recode_due = True
        return self._cache.pins.unpin(pin_id)
