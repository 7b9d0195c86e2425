"""What an engine's steps did and how long they took, recorded from a live one and played back in a simulation.

Played back, the simulation decides by itself; every decision is held against the recorded one. No torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.attention_mass import ObservedMass
from engine.clock import Clock
from engine.link_times import Mover
from engine.plan import RecodeBatch, SequenceOutput, StepPlan
from engine.runner import Runner, StepWork
from engine.transfers import HostLink, Transfer
from envs.virtual_clock import VirtualClock

if TYPE_CHECKING:
    from engine.cache_manager import CacheManager


@dataclass(frozen=True)
class RecordedStep:
    """One call of a runner. ``decision``: digest of everything that was decided for it. ``tokens``: what it sampled, in
    the order of the plan, and ``masses``: the attention that eviction asked for. Work as in
    :class:`engine.runner.StepWork`.
    """

    decision: str
    duration_ns: int
    tokens: tuple[int | None, ...] = ()
    kv_bytes_read: int = 0
    kv_bytes_written: int = 0
    masses: tuple[ObservedMass | None, ...] = ()
    host_bytes_read: int = 0
    host_wait_ns: int = 0


def recode_decision(batches: Sequence[RecodeBatch]) -> str:
    """Digest of every conversion with its places in the arenas."""
    return _digest([(batch.group, batch.jobs, batch.num_tokens) for batch in batches])


def step_decision(plan: StepPlan, cache: CacheManager) -> str:
    """Digest of a plan: who computes what, with which block table in every group, and who was preempted."""
    groups = range(len(cache.groups))
    rows: list[object] = [request.request_id for request in plan.preempted]
    for sequence in plan.sequences:
        request = sequence.request
        tables = [
            [(e.offset, e.format_code, e.first, e.valid, e.on_host) for e in cache.entries(request, group)]
            for group in groups
        ]
        rows.append((request.request_id, sequence.start, sequence.num_tokens, sequence.samples, tables))
    return _digest(rows)


def _digest(what: object) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()[:24]


class RecordingRunner:
    """Passes everything on to a live engine's runner and keeps a record of it in ``steps``."""

    def __init__(self, runner: Runner, clock: Clock) -> None:
        self.steps: list[RecordedStep] = []
        self._runner = runner
        self._clock = clock

    @property
    def last_work(self) -> StepWork:
        return self._runner.last_work

    def recode(self, batches: Sequence[RecodeBatch]) -> None:
        begin_ns = self._clock.now_ns()
        self._runner.recode(batches)
        self.steps.append(RecordedStep(recode_decision(batches), self._clock.now_ns() - begin_ns))

    def execute(self, plan: StepPlan, cache: CacheManager) -> list[SequenceOutput]:
        decision, begin_ns = step_decision(plan, cache), self._clock.now_ns()
        outputs = self._runner.execute(plan, cache)
        duration_ns, work = self._clock.now_ns() - begin_ns, self._runner.last_work
        tokens = tuple(output.token_id for output in outputs)
        masses = tuple(output.mass for output in outputs)
        self.steps.append(
            RecordedStep(
                decision,
                duration_ns,
                tokens,
                work.kv_bytes_read,
                work.kv_bytes_written,
                masses,
                work.host_bytes_read,
                work.host_wait_ns,
            )
        )
        return outputs


@dataclass
class PlaybackRunner:
    """Takes a record's times and tokens. ``differing``: numbers of the steps for which another decision was made."""

    steps: Sequence[RecordedStep]
    clock: VirtualClock
    differing: list[int] = field(default_factory=list)
    next_step: int = 0
    kv_bytes_read: int = 0
    kv_bytes_written: int = 0
    host_bytes_read: int = 0
    host_wait_ns: int = 0

    @property
    def last_work(self) -> PlaybackRunner:
        return self

    def recode(self, batches: Sequence[RecodeBatch]) -> None:
        self._take(recode_decision(batches))

    def execute(self, plan: StepPlan, cache: CacheManager) -> list[SequenceOutput]:
        step = self._take(step_decision(plan, cache))
        self.kv_bytes_read, self.kv_bytes_written = step.kv_bytes_read, step.kv_bytes_written
        self.host_bytes_read, self.host_wait_ns = step.host_bytes_read, step.host_wait_ns
        # Where decisions differ there may be fewer tokens than sequences: those without count as not run.
        tokens = [*step.tokens, *[None] * len(plan.sequences)]
        masses = [*step.masses, *[None] * len(plan.sequences)]
        return [
            SequenceOutput(sequence.request, token, mass=mass)
            for sequence, token, mass in zip(plan.sequences, tokens, masses, strict=False)
        ]

    def _take(self, decision: str) -> RecordedStep:
        """Raises IndexError when the record ends before the simulation does."""
        step = self.steps[self.next_step]
        if step.decision != decision:
            self.differing.append(self.next_step)
        self.next_step += 1
        self.clock.advance_ns(step.duration_ns)
        return step


# -- time, and copies between the tiers ----------------------------------------------------------------------------


class RecordingClock:
    """A live engine's clock: passes on what another says and keeps it in ``readings``.

    ``skip_to_ns`` is that of a clock which can skip time.
    """

    def __init__(self, clock: Clock) -> None:
        self.readings: list[int] = []
        self._clock = clock

    def skip_to_ns(self, now_ns: int) -> None:
        self._clock.skip_to_ns(now_ns)  # type: ignore[attr-defined]

    def now_ns(self) -> int:
        self.readings.append(self._clock.now_ns())
        return self.readings[-1]

    def wall_s(self) -> float:
        return self._clock.wall_s()


class PlaybackClock(VirtualClock):
    """Says what a record says, reading by reading: whatever asks at all is told the live engine's time.

    ``now_ns`` raises IndexError when the record ends before the simulation does.
    """

    def __init__(self, readings: Sequence[int]) -> None:
        super().__init__()
        self._readings = readings
        self.next_reading = 0

    def now_ns(self) -> int:
        self.next_reading += 1
        return self._readings[self.next_reading - 1]

    def skip_to_ns(self, now_ns: int) -> None:
        """The record knows what time it is after."""


class RecordingMover:
    """A live engine's mover. ``submitted``: digest of every lot of copies; ``arrivals``: what came at every look."""

    def __init__(self, mover: Mover) -> None:
        self.submitted: list[str] = []
        self.arrivals: list[tuple[int, ...]] = []
        self._mover = mover

    @property
    def link(self) -> HostLink:
        return self._mover.link

    def submit(self, transfers: Sequence[Transfer]) -> None:
        self.submitted.append(_digest(transfers))
        self._mover.submit(transfers)

    def arrived(self) -> list[int]:
        numbers = self._mover.arrived()
        self.arrivals.append(tuple(numbers))
        return numbers

    def wait_ns(self) -> int:
        return self._mover.wait_ns()


@dataclass
class PlaybackMover:
    """Copies arrive when they did. ``differing``: numbers of the lots that were decided otherwise."""

    link: HostLink
    submitted: Sequence[str]
    arrivals: Sequence[tuple[int, ...]]
    differing: list[int] = field(default_factory=list)
    next_lot: int = 0
    next_look: int = 0

    def submit(self, transfers: Sequence[Transfer]) -> None:
        """Raises IndexError when the record ends before the simulation does, as ``arrived`` does."""
        if self.submitted[self.next_lot] != _digest(transfers):
            self.differing.append(self.next_lot)
        self.next_lot += 1

    def arrived(self) -> list[int]:
        self.next_look += 1
        return [*self.arrivals[self.next_look - 1]]

    def wait_ns(self) -> int:
        return 0
