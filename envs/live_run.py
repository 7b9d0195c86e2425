"""Runs a trace against a real engine in this process, open loop, without a server: what a simulation is held against.

The engine's own scheduler, cache, step loop and model. Time is either the machine's, with the engine's own thread and
requests added at their arrival times; or that of the processor's work for this process (:class:`CpuClock`), in which
nobody waits: what other processes do to the machine then shows only as slower memory. With one thread on an idle
machine the two agree. torch is imported only when called.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from engine.admission import AdmissionError
from engine.cache_manager import CacheManager
from engine.clock import Clock, RealClock
from engine.core import EngineCore
from engine.core_options import CoreOptions
from engine.core_stats import CoreStats
from engine.core_thread import EngineThread
from engine.events import NullSink
from engine.request_delta import RequestDelta
from engine.runner import Runner
from engine.scheduler import Scheduler
from engine.stats import Counters
from engine.tunable_state import Patch
from engine.tunables import TunableValue, default_values
from envs.arrivals_feed import TraceFeed
from envs.latency_model import LatencyModel
from envs.ledger import Ledger, RequestRecord
from envs.signals import Targets
from envs.sim_request import SimRequest, make_request
from envs.simulator import Executor, SimOptions, Simulator
from envs.step_recording import PlaybackClock, PlaybackRunner, RecordedStep, RecordingClock, RecordingRunner
from envs.workload.trace import Trace

if TYPE_CHECKING:
    from engine.loader import LoadedModel
    from engine.model_runner import ModelRunner

_LONGEST_S: Final = 300.0
_LEAD_S: Final = 0.05


class CpuClock:
    """Time that this process has computed, and what was skipped while it had nothing to do. One thread only."""

    def __init__(self) -> None:
        self._skipped_ns = 0

    def now_ns(self) -> int:
        return time.process_time_ns() + self._skipped_ns

    def wall_s(self) -> float:
        return time.time()

    def skip_to_ns(self, now_ns: int) -> None:
        """Nothing happens until then."""
        self._skipped_ns += max(0, now_ns - self.now_ns())


class SkippingClock(Clock, Protocol):
    """A clock of work done: where nobody has anything to do, time is skipped."""

    def skip_to_ns(self, now_ns: int) -> None: ...


@dataclass
class RunRecord:
    """What a simulation needs to go through the same run: every reading of the engine's clock, and its steps."""

    readings: list[int]
    steps: list[RecordedStep]


@dataclass
class LiveOutcome:
    """Every request's record, and the engine's counters at the end."""

    records: list[RequestRecord] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)


class LiveEngineRun:
    """A model with its arenas, to be run as often as wanted under different settings of one pool size."""

    def __init__(self, loaded: LoadedModel, pool_bytes: int, *, cpu_time: bool = False) -> None:
        """``cpu_time``: see the module; else the machine's time."""
        from engine.model_runner import ModelRunner  # noqa: PLC0415
        from engine.warmup import warm_up  # noqa: PLC0415
        from kernels import ops  # noqa: PLC0415

        self._loaded = loaded
        self._pool_bytes = pool_bytes
        self._cpu_time = cpu_time
        layout = self._cache(default_values(), SimOptions(pool_bytes, 1), Counters()).layout
        sizes = [layout.arena_bytes(group) for group in range(len(loaded.groups))]
        self._runner: ModelRunner = ModelRunner(loaded, sizes, ops, rng=random.Random(0))
        loaded.model.warm_up()
        warm_up(self._runner, loaded.groups, pool_bytes, RealClock())

    def _cache(
        self, values: dict[str, TunableValue], options: SimOptions, counters: Counters, clock: Clock | None = None
    ) -> CacheManager:
        return CacheManager(
            self._loaded.groups,
            self._pool_bytes,
            values,
            recent_tokens=options.recent_tokens,
            sinks=options.sinks,
            watermark=options.watermark,
            clock=clock or RealClock(),
            events=NullSink(),
            counters=counters,
        )

    def run(self, trace: Trace, options: SimOptions, changes: Sequence[tuple[float, Patch]] = ()) -> LiveOutcome:
        """Play a trace; ``changes``: moments in seconds and what is patched then. Takes as long as the trace does, or
        as its work does.

        Raises TimeoutError when requests have not ended within minutes.
        """
        clock = CpuClock() if self._cpu_time else RealClock()
        return self._run(trace, options, changes, clock, self._runner)

    def record(
        self, trace: Trace, options: SimOptions, changes: Sequence[tuple[float, Patch]] = ()
    ) -> tuple[LiveOutcome, RunRecord]:
        """The same in the processor's time, and a record of it."""
        inner = CpuClock()
        clock, runner = RecordingClock(inner), RecordingRunner(self._runner, inner)
        outcome = self._run(trace, options, changes, clock, runner)
        return outcome, RunRecord(clock.readings, runner.steps)

    def play_back(
        self, trace: Trace, options: SimOptions, record: RunRecord, changes: Sequence[tuple[float, Patch]] = ()
    ) -> tuple[Counters, list[int]]:
        """A simulation of a recorded run under its times; its counters, and the steps that it decided otherwise.

        Raises IndexError when it takes more steps, or asks for the time more often, than the live engine did.
        """
        clock = PlaybackClock(record.readings)
        runner = PlaybackRunner(record.steps, clock)
        simulator = Simulator(
            self._loaded.groups,
            LatencyModel({}),
            options,
            TraceFeed(trace),
            executor=Executor(runner, clock),
        )
        _play_in_cpu_time(self._moments(trace, options, changes), simulator.core, clock, Ledger(Targets()))
        return simulator.scheduler.counters, runner.differing

    def _moments(
        self, trace: Trace, options: SimOptions, changes: Sequence[tuple[float, Patch]]
    ) -> list[tuple[float, SimRequest | Patch]]:
        return sorted([*self._requests(trace, options), *changes], key=lambda pair: pair[0])

    def _run(
        self,
        trace: Trace,
        options: SimOptions,
        changes: Sequence[tuple[float, Patch]],
        clock: Clock,
        runner: Runner,
    ) -> LiveOutcome:
        if options.host_pool_bytes:
            raise ValueError("a live run for comparison has no host tier")
        values: dict[str, TunableValue] = {**default_values(), **options.values}
        counters = Counters()
        cache = self._cache(values, options, counters, clock)
        scheduler = Scheduler(
            cache,
            values,
            max_model_len=options.max_model_len,
            max_waiting=options.max_waiting,
            clock=clock,
            counters=counters,
            recode_tokens_per_step=0 if options.recode_share else options.recode_budget_tokens,
        )
        core = EngineCore(
            scheduler,
            cache,
            runner,
            values,
            clock,
            options=CoreOptions(
                "live", "live", options.max_model_len, options.idle_recode_tokens, options.recode_share
            ),
            stats=CoreStats(counters),
        )
        moments = self._moments(trace, options, changes)
        outcome = LiveOutcome(counters=counters)
        ledger = Ledger(Targets(), outcome.records.append)
        if isinstance(clock, CpuClock | RecordingClock):
            _play_in_cpu_time(moments, core, clock, ledger)
        else:
            _play_in_real_time(moments, core, clock, ledger)
        return outcome

    def _requests(self, trace: Trace, options: SimOptions) -> Iterator[tuple[float, SimRequest]]:
        vocabulary = self._loaded.config.vocab_size
        for index, source in enumerate(trace.requests):
            request = make_request(
                source, index, 0, trace.block_tokens, max_model_len=options.max_model_len, prefix_cache=True
            )
            request.prompt_ids = _within(request.prompt_ids, vocabulary)
            yield source.arrival_s, request


def _play_in_cpu_time(
    moments: Sequence[tuple[float, SimRequest | Patch]], core: EngineCore, clock: SkippingClock, ledger: Ledger
) -> None:
    start_ns, live, ended = clock.now_ns(), {}, list[SimRequest]()
    coming = deque((start_ns + round(1e9 * at_s), what) for at_s, what in moments)
    while coming or core.has_work:
        while coming and coming[0][0] <= clock.now_ns():
            at_ns, what = coming.popleft()
            if isinstance(what, Patch):
                core.patch(what)
                continue
            what.arrival_ns = at_ns
            try:
                core.add(what)
                live[what.request_id] = what
            except AdmissionError:
                ledger.rejected(what)
        if core.has_work:
            for delta in core.step():
                if delta.finish_reason is not None:
                    ended.append(live.pop(delta.request_id))
        elif core.has_background_work:
            core.background()
        elif coming:
            clock.skip_to_ns(coming[0][0])
    for request in ended:  # not on the way: no engine has to keep these books
        ledger.ended(request, "completed")


def _play_in_real_time(
    moments: Sequence[tuple[float, SimRequest | Patch]], core: EngineCore, clock: Clock, ledger: Ledger
) -> None:
    left = threading.Semaphore(0)

    def deliver(deltas: list[RequestDelta]) -> None:
        for delta in deltas:
            if delta.finish_reason is not None:
                left.release()

    thread = EngineThread(core, deliver)
    thread.start()
    try:
        sent = _send(moments, thread, clock, left)
        for _ in sent:
            if not left.acquire(timeout=_LONGEST_S):
                raise TimeoutError("the engine does not get done")
    finally:
        thread.stop(10.0)
    for request, added in sent:
        refusal = added.exception()
        if isinstance(refusal, AdmissionError):
            ledger.rejected(request)
        elif refusal is not None:
            raise refusal
        else:
            ledger.ended(request, "completed")


def _send(
    moments: Sequence[tuple[float, SimRequest | Patch]], thread: EngineThread, clock: Clock, left: threading.Semaphore
) -> list[tuple[SimRequest, Future[None]]]:
    start_ns = clock.now_ns() + round(1e9 * _LEAD_S)
    sent: list[tuple[SimRequest, Future[None]]] = []
    for at_s, what in moments:
        wait_s = (start_ns - clock.now_ns()) / 1e9 + at_s
        if wait_s > 0:
            time.sleep(wait_s)
        if isinstance(what, Patch):
            thread.call(lambda core, patch=what: core.patch(patch))  # type: ignore[misc]
            continue
        what.arrival_ns = clock.now_ns()
        added = thread.call(lambda core, request=what: core.add(request))  # type: ignore[misc]
        # Not waited for: the next one may arrive within the same step.
        added.add_done_callback(lambda future: left.release() if future.exception() is not None else None)
        sent.append((what, added))
    return sent


def _within(ids: list[int], vocabulary: int) -> list[int]:
    """Identities as tokens of a vocabulary: equal ones stay equal, others hardly ever meet for 16 in a row."""
    mixed = (np.array(ids, np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return ((mixed >> np.uint64(33)) % np.uint64(vocabulary)).astype(np.int64).tolist()  # type: ignore[no-any-return]
