"""The engine on a virtual clock: its own scheduler, cache and step loop, with a latency model in place of the model.

Nothing of the engine is reimplemented, so nothing can drift: only the executor differs (:mod:`envs.simulated_runner`).
Requests and changes from outside take effect at step boundaries, as in the engine's thread.
"""

from __future__ import annotations

import copy
import heapq
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from engine.admission import AdmissionError
from engine.cache_manager import CacheManager
from engine.core import EngineCore
from engine.core_options import CoreOptions
from engine.core_stats import CoreStats
from engine.events import EventSink, NullSink
from engine.link_times import Mover, TimedMover
from engine.memory_model import GroupSpec
from engine.request import FinishReason
from engine.runner import Runner
from engine.scheduler import Scheduler
from engine.stats import Counters, EngineStats, Gauges
from engine.stream_layout import STAGING_PART
from engine.transfers import HostLink
from engine.tunable_state import Patch, PatchOutcome
from engine.tunables import TunableValue, default_values
from envs.arrivals_feed import Feed
from envs.latency_model import LatencyModel
from envs.ledger import Ledger
from envs.reward import QualityTable, literature_quality
from envs.signals import Targets
from envs.sim_host import HostStreams
from envs.sim_request import SimRequest, make_request
from envs.simulated_runner import Jitter, SimulatedRunner
from envs.virtual_clock import VirtualClock

_STATUS: Final = {
    FinishReason.STOP: "completed",
    FinishReason.LENGTH: "completed",
    FinishReason.ABORT: "aborted",
    FinishReason.ERROR: "failed",
}


@dataclass(frozen=True)
class SimOptions:
    """What is fixed about a simulated engine. ``values``: tunables at start that differ from their defaults.

    ``actuation_delay_s``: from writing a change to the first step boundary that may take it. ``patience_s``: a client
    whose first token has not come after this cancels. ``prefix_cache``: whether requests take part in it.
    ``bandwidth_bytes_per_s``: what the engine says of its device. ``jump``: take runs of decode steps at once.
    ``recode_share``: of a step's time that recoding may add, in place of ``recode_budget_tokens`` (an engine on a CPU
    works so: 0.15). ``host_pool_bytes``: of host memory for KV, behind ``host_link``; as in an engine, a part of the
    pool is then for streaming from it.
    """

    pool_bytes: int
    max_model_len: int
    values: dict[str, TunableValue] = field(default_factory=dict)
    max_waiting: int = 256
    recent_tokens: int = 64
    sinks: int = 16
    watermark: float = 0.01
    recode_budget_tokens: int = 512
    recode_share: float = 0.0
    idle_recode_tokens: int = 2048
    actuation_delay_s: float = 0.0
    patience_s: float | None = None
    prefix_cache: bool = True
    bandwidth_bytes_per_s: float | None = None
    jump: bool = True
    jitter: Jitter = field(default_factory=Jitter)
    model_name: str = "simulated"
    host_pool_bytes: int = 0
    host_link: HostLink | None = None

    @property
    def staging_bytes(self) -> int:
        """The part of the pool that is set apart for streaming from the host."""
        return self.pool_bytes // STAGING_PART if self.host_pool_bytes else 0


@dataclass(frozen=True)
class Executor:
    """What carries plans out in place of the latency model, and the clock that it moves. Takes single steps."""

    runner: Runner
    clock: VirtualClock
    mover: Mover | None = None


class Simulator:
    """One engine and its clients. Deterministic: the same arguments give the same result, in any process.

    ``ledger`` has the true figures. Raises ValueError for a pool that is too small or a tunable that is not offered.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        model: LatencyModel,
        options: SimOptions,
        feed: Feed,
        *,
        ledger: Ledger | None = None,
        quality: QualityTable | None = None,
        events: EventSink | None = None,
        executor: Executor | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        """``feed`` is copied, so that several simulators of one feed all get all of it. ``executor``: a recording, say.
        ``eos_token_ids``: tokens that end a request which heeds them; a feed has no such token.
        """
        values = {**default_values(), **options.values}
        self.options = options
        self.clock = VirtualClock() if executor is None else executor.clock
        self.ledger = ledger or Ledger(Targets())
        sink, counters = events or NullSink(), Counters()
        self.cache = CacheManager(
            groups,
            options.pool_bytes - options.staging_bytes,
            values,
            recent_tokens=options.recent_tokens,
            sinks=options.sinks,
            watermark=options.watermark,
            clock=self.clock,
            events=sink,
            counters=counters,
            host_pool_bytes=options.host_pool_bytes,
            link=options.host_link,
            staging_bytes=options.staging_bytes,
        )
        self.scheduler = Scheduler(
            self.cache,
            values,
            max_model_len=options.max_model_len,
            max_waiting=options.max_waiting,
            clock=self.clock,
            counters=counters,
            events=sink,
            eos_token_ids=eos_token_ids,
            recode_tokens_per_step=0 if options.recode_share else options.recode_budget_tokens,
        )
        mover: Mover | None = None
        streams: HostStreams | None = None
        if executor is not None:
            mover = executor.mover
        elif options.host_pool_bytes and options.host_link is not None:
            mover = timed = TimedMover(options.host_link, self.clock)
            streams = HostStreams(groups, timed.line, self.clock)
        self.runner = SimulatedRunner(
            model, groups, self.clock, self.ledger, quality or literature_quality(), options.jitter, streams
        )
        self.core = EngineCore(
            self.scheduler,
            self.cache,
            self.runner if executor is None else executor.runner,
            values,
            self.clock,
            options=CoreOptions(
                options.model_name,
                "simulated",
                options.max_model_len,
                idle_recode_tokens=options.idle_recode_tokens,
                recode_share=options.recode_share,
            ),
            stats=CoreStats(counters),
            probe=_Probe(options.bandwidth_bytes_per_s),
            mover=mover,
        )
        self._feed = copy.copy(feed)
        self._live: dict[str, SimRequest] = {}
        self._commands: list[tuple[int, int, str, Any]] = []  # by time, then by order given
        self._number = 0
        # A model that hides KV by position changes what a step costs in ways that a run does not follow.
        self._jumps = options.jump and executor is None and all(group.window is None for group in groups)

    # -- from outside ---------------------------------------------------------------------------------------------

    @property
    def now_ns(self) -> int:
        return self.clock.now_ns()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to do and nothing will arrive any more."""
        return not (self._live or self._commands) and self._feed.next_ns is None

    def apply(self, patch: Patch) -> PatchOutcome | None:
        """Write tunables now: at this step boundary, or after the actuation delay, and then the answer is not known."""
        if not self.options.actuation_delay_s:
            return self.core.patch(patch)
        self._command(self.now_ns + round(1e9 * self.options.actuation_delay_s), "patch", patch)
        return None

    def cancel(self, request_id: str, at_ns: int) -> None:
        """The client of a request goes away."""
        self._command(at_ns, "cancel", request_id)

    def stats(self) -> EngineStats:
        """What the engine says about itself now."""
        return self.core.stats()

    def _command(self, at_ns: int, kind: str, what: Any) -> None:
        heapq.heappush(self._commands, (at_ns, self._number, kind, what))
        self._number += 1

    # -- time -----------------------------------------------------------------------------------------------------

    def run_until(self, until_ns: int) -> None:
        """Go on to the first step boundary at or after a moment."""
        while self.now_ns < until_ns:
            due_ns = self._take_commands()
            limit_ns = until_ns if due_ns is None else min(until_ns, due_ns)
            if self.core.has_work:
                self._work(limit_ns)
            elif self.core.has_background_work:
                self.core.background()
                self._wait(limit_ns)
            else:
                self.clock.move_to_ns(limit_ns)
        self._take_commands()

    def drain(self, longest_s: float = 1e7) -> None:
        """Run until everything that arrives has ended; at most for ``longest_s``."""
        end_ns = self.now_ns + round(1e9 * longest_s)
        while not self.is_idle and self.now_ns < end_ns:
            due_ns = self._take_commands()
            limit_ns = end_ns if due_ns is None else due_ns
            if self.core.has_work:
                self._work(limit_ns)
            elif due_ns is not None:
                self.clock.move_to_ns(limit_ns)

    def _work(self, limit_ns: int) -> None:
        if self._jumps:
            for request in self.core.run_decodes(self.runner, limit_ns):
                del self._live[request.request_id]
            if self.now_ns >= limit_ns or not self.core.has_work:
                return
        before_ns = self.now_ns
        self.step()
        if self.now_ns == before_ns:
            self._wait(limit_ns)  # an empty plan

    def _wait(self, limit_ns: int) -> None:
        """As long as the engine's thread would: for room, for a copy, or for a command."""
        pause_s = self.core.pause_s
        pause_ns = limit_ns - self.now_ns if pause_s is None else round(1e9 * pause_s)
        self.clock.move_to_ns(min(limit_ns, self.now_ns + pause_ns))

    def step(self) -> None:
        """One step of the engine, whatever the time."""
        for delta in self.core.step():
            if delta.finish_reason is not None:
                self.ledger.ended(self._live.pop(delta.request_id), _STATUS[delta.finish_reason])

    def _take_commands(self) -> int | None:
        """Do what is due; returns when the next thing from outside is, None if nothing ever is."""
        now_ns, feed = self.clock.now_ns(), self._feed
        while True:
            arrival_ns = feed.next_ns
            command_ns = self._commands[0][0] if self._commands else None
            if command_ns is not None and command_ns <= now_ns and (arrival_ns is None or command_ns < arrival_ns):
                _, _, kind, what = heapq.heappop(self._commands)
                self._obey(kind, what)
            elif arrival_ns is not None and arrival_ns <= now_ns:
                index, source = feed.pop()
                self.submit(
                    make_request(
                        source,
                        index,
                        arrival_ns,
                        feed.block_tokens,
                        max_model_len=self.options.max_model_len,
                        prefix_cache=self.options.prefix_cache,
                    )
                )
            elif arrival_ns is None or command_ns is None:
                return arrival_ns if command_ns is None else command_ns
            else:
                return min(arrival_ns, command_ns)

    def submit(self, request: SimRequest) -> bool:
        """A request arrives now; False if it was refused."""
        self.ledger.figures.offered += 1
        try:
            self.core.add(request)
        except AdmissionError:
            self.ledger.rejected(request)
            return False
        self._live[request.request_id] = request
        if self.options.patience_s is not None:
            self._command(request.arrival_ns + round(1e9 * self.options.patience_s), "patience", request.request_id)
        return True

    def _obey(self, kind: str, what: Any) -> None:
        if kind == "patch":
            self.core.patch(what)
            return
        request = self._live.get(what)
        if request is None or (kind == "patience" and request.first_token_ns is not None):
            return
        if self.core.abort(what):
            self.ledger.ended(self._live.pop(what), "aborted")

    # -- snapshots ------------------------------------------------------------------------------------------------

    def snapshot(self) -> bytes:
        """The whole state, clients and clock included. What is to come (the feed's trace) is kept by reference to time
        only if the feed pickles so.
        """
        return pickle.dumps(self.__dict__, protocol=pickle.HIGHEST_PROTOCOL)

    def restore(self, snapshot: bytes) -> None:
        """Back to a snapshot of this simulator, which stays reusable."""
        self.__dict__.update(pickle.loads(snapshot))  # noqa: S301  # made by snapshot() in this process


@dataclass(frozen=True)
class _Probe:
    """Fills in what a real engine measures of its device."""

    bandwidth_bytes_per_s: float | None

    def __call__(self, gauges: Gauges) -> None:
        gauges.memory_bandwidth_bytes_per_s = self.bandwidth_bytes_per_s
