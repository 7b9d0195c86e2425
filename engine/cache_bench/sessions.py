"""Generated multi-turn sessions, and a driver that runs them through the engine on a clock of its own.

A session is a first prompt and some turns; each turn sends the whole conversation so far and some new tokens, waits for
a fixed number of output tokens, and thinks. All of it follows from a seed.

The driver's clock runs only while its engine works, in processor time of this process, and is moved ahead where the
engine has nothing to do before the next arrival or the end of a copy. So think times and waits for an emulated link
cost no time here, and what is measured is what they would make of an engine that had the machine to itself. Engines
that are compared take turns, so that a machine that slows down slows them all.
"""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

from engine.loader import LoadedModel
from engine.memory_model import token_bytes
from engine.offline import OfflineEngine
from engine.plan import StepPlan
from engine.request import Request, SamplingParams
from engine.transfers import HostLink
from engine.tunables import TunableValue


class LapClock:
    """A monotonic clock that stands still between laps and can be moved ahead."""

    def __init__(self) -> None:
        self._before_ns = 0
        self._since_ns: int | None = None

    def now_ns(self) -> int:
        running = time.process_time_ns() - self._since_ns if self._since_ns is not None else 0
        return self._before_ns + running

    def wall_s(self) -> float:
        return self.now_ns() / 1e9

    def skip_s(self, seconds: float) -> None:
        """Nothing happens for a while."""
        self._before_ns += max(0, round(seconds * 1e9))

    @contextmanager
    def lap(self) -> Iterator[None]:
        """Let it run."""
        self._since_ns = time.process_time_ns()
        try:
            yield
        finally:
            self._before_ns += time.process_time_ns() - self._since_ns
            self._since_ns = None


@dataclass(frozen=True)
class SessionShape:
    """Tokens and turns of every session; lengths are uniform in half to one and a half times what is given."""

    num_sessions: int
    turns: int
    first_tokens: int
    turn_tokens: int
    output_tokens: int
    think_s: float
    clients: int = 0  # sessions under way at once, in order; 0: all of them, starting spread over one think time

    @property
    def final_tokens(self) -> int:
        """Mean length of a session at its end."""
        return self.first_tokens + self.turns * (self.turn_tokens + self.output_tokens)


@dataclass
class Session:
    """One conversation."""

    rng: random.Random
    history: list[int] = field(default_factory=list)
    turn: int = 0


@dataclass
class Tally:
    """What a run has seen. Times in seconds of the driver's clock."""

    ttft_s: list[float] = field(default_factory=list)
    tbt_s: list[float] = field(default_factory=list)
    busy_s: float = 0.0  # in steps that computed something
    waited_s: float = 0.0  # with requests, but for copies only
    output_tokens: int = 0
    prefill_tokens: int = 0
    prompt_tokens: int = 0
    steps: list[tuple[int, int, float]] = field(default_factory=list)  # decode tokens, prefill tokens, seconds


def quantile(values: list[float], q: float) -> float:
    """The q-quantile, 0 < q <= 1, of at least one value."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


class SessionLoad:
    """Sessions over one engine. Call :meth:`turn` until it returns False."""

    def __init__(
        self,
        loaded: LoadedModel,
        shape: SessionShape,
        pool_tokens: int,
        *,
        seed: int,
        host_tokens: int = 0,
        link: HostLink | None = None,
        staging_tokens: int = 0,
        **values: TunableValue,
    ) -> None:
        """Pool, host pool and buffers for streaming in native tokens."""
        size = sum(token_bytes(group.shape) for group in loaded.groups)
        self.clock = LapClock()
        self.tally = Tally()
        self.engine = OfflineEngine(
            loaded,
            pool_bytes=int(pool_tokens * size),
            values={"host_offload": "on" if host_tokens else "off", **values},
            sync_recode=False,
            clock=self.clock,
            host_pool_bytes=int(host_tokens * size),
            link=link if host_tokens else None,
            staging_bytes=int(staging_tokens * size) if host_tokens else 0,
            pause=self.clock.skip_s,
        )
        self._shape = shape
        self._vocab = loaded.config.vocab_size
        self._order = count()
        rng = random.Random(seed)
        sessions = [Session(random.Random(rng.random())) for _ in range(shape.num_sessions)]
        now = shape.clients or shape.num_sessions
        self._arrivals = [
            (round(rng.uniform(0, shape.think_s) * 1e9), next(self._order), session) for session in sessions[:now]
        ]
        heapq.heapify(self._arrivals)
        self._later = sessions[now:]
        self._live: dict[Request, tuple[Session, int, int]] = {}  # due, last token

    def turn(self) -> bool:
        """One step, or one pause; False when all sessions have ended."""
        scheduler = self.engine.scheduler
        with self.clock.lap():
            self._admit()
            begin_ns = self.clock.now_ns()
            plan = self.engine.step()
            self._note(plan, begin_ns)
        if not plan.is_empty:
            return True
        if scheduler.has_work:
            self.tally.waited_s += (self.clock.now_ns() - begin_ns) / 1e9
            return True
        return self._idle()

    def _idle(self) -> bool:
        """Nothing runs: go to the next arrival, or to the end of a copy before it."""
        mover, cache = self.engine.mover, self.engine.cache
        if not self._arrivals:
            return False
        ahead_s = (self._arrivals[0][0] - self.clock.now_ns()) / 1e9
        if mover is not None and cache.num_transfers:
            ahead_s = min(ahead_s, mover.wait_ns() / 1e9)
        self.clock.skip_s(ahead_s)
        return True

    def _admit(self) -> None:
        while self._arrivals and self._arrivals[0][0] <= self.clock.now_ns():
            due_ns, _, session = heapq.heappop(self._arrivals)
            shape, rng = self._shape, session.rng
            mean = shape.turn_tokens + (shape.first_tokens if session.turn == 0 else 0)
            session.history += [rng.randrange(3, self._vocab) for _ in range(rng.randint(mean // 2, mean + mean // 2))]
            params = SamplingParams(max_tokens=shape.output_tokens, ignore_eos=True)
            result = self.engine.add(session.history, params)
            result.request.arrival_ns = due_ns
            self.tally.prompt_tokens += len(session.history)
            self._live[result.request] = session, due_ns, due_ns

    def _note(self, plan: StepPlan, begin_ns: int) -> None:
        now_ns = self.clock.now_ns()
        decode = sum(sequence.is_decode for sequence in plan.sequences)
        prefill = plan.num_tokens - decode
        if plan.sequences:
            seconds = (now_ns - begin_ns) / 1e9
            self.tally.busy_s += seconds
            self.tally.prefill_tokens += prefill
            self.tally.steps.append((decode, prefill, seconds))
        for request, (session, due_ns, last_ns) in list(self._live.items()):
            token_ns = request.last_token_ns
            if token_ns is None or token_ns == last_ns:
                continue
            self.tally.output_tokens += 1
            if last_ns == due_ns:
                self.tally.ttft_s.append((token_ns - due_ns) / 1e9)
            else:
                self.tally.tbt_s.append((token_ns - last_ns) / 1e9)
            self._live[request] = session, due_ns, token_ns
            if request.finish_reason is not None:
                del self._live[request]
                self._ended(session, request, now_ns)

    def _ended(self, session: Session, request: Request, now_ns: int) -> None:
        session.history = session.history + request.output_ids
        session.turn += 1
        think_ns = round(session.rng.expovariate(1.0) * self._shape.think_s * 1e9) if self._shape.think_s else 0
        if session.turn < self._shape.turns:
            # With fewer clients than sessions a client talks to another one meanwhile.
            if self._later:
                self._later.append(session)
                session = self._later.pop(0)
            heapq.heappush(self._arrivals, (now_ns + think_ns, next(self._order), session))
        elif self._later:
            heapq.heappush(self._arrivals, (now_ns + think_ns, next(self._order), self._later.pop(0)))


def warm_up(loaded: LoadedModel) -> None:
    """Whatever is slow the first time: compiling kernels, first touches of memory."""
    shape = SessionShape(num_sessions=4, turns=2, first_tokens=300, turn_tokens=40, output_tokens=8, think_s=0.0)
    load = SessionLoad(loaded, shape, 8192, seed=0)
    while load.turn():
        pass


def run_together(loads: list[SessionLoad]) -> None:
    """Run loads to their ends, in turns: always the one that is furthest behind in its own time."""
    going = list(loads)
    while going:
        load = min(going, key=lambda each: each.clock.now_ns())
        if not load.turn():
            going.remove(load)
