"""The one event stream: what happened to requests, blocks, recodes and steps.

It feeds metrics, journal and the simulator's contract tests.

Every event carries the monotonic stamp of the engine's clock. Events are facts after they happened; a sink must not
call back into the engine. Per-token happenings are aggregated: at most a few events per step and request.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Event:
    """Base: ``stamp_ns`` of the engine's monotonic clock."""

    stamp_ns: int


@dataclass(frozen=True)
class RequestAdded(Event):
    """A request was queued (``num_prompt_tokens`` > 0)."""

    request_id: str
    num_prompt_tokens: int


@dataclass(frozen=True)
class RequestRejected(Event):
    """A request was refused at admission; ``kind`` is an ``AdmissionError.kind``."""

    request_id: str
    kind: str


@dataclass(frozen=True)
class RequestAdmitted(Event):
    """A request runs (again, if ``resumed``) with ``num_cached_tokens`` from the prefix cache."""

    request_id: str
    num_cached_tokens: int
    resumed: bool


@dataclass(frozen=True)
class RequestPreempted(Event):
    """A running request lost its KV of ``num_computed_tokens`` to others, and will be recomputed."""

    request_id: str
    num_computed_tokens: int


@dataclass(frozen=True)
class RequestParked(Event):
    """A running request lost its place to others and keeps its KV of ``num_computed_tokens``, on the host."""

    request_id: str
    num_computed_tokens: int


@dataclass(frozen=True)
class RequestLoading(Event):
    """A request was admitted and waits for KV from the host; ``was_parked``: its own, else that of its prefix."""

    request_id: str
    was_parked: bool


@dataclass(frozen=True)
class RequestFinished(Event):
    """A request ended; ``reason`` is a ``FinishReason`` value."""

    request_id: str
    reason: str
    num_output_tokens: int


@dataclass(frozen=True)
class StepScheduled(Event):
    """A non-empty step was planned."""

    num_decode_tokens: int
    num_prefill_tokens: int
    num_recode_tokens: int
    num_running: int
    num_waiting: int


@dataclass(frozen=True)
class BlocksRecoded(Event):
    """Blocks of one group changed class at a step boundary."""

    group: int
    kv_format: str
    block_size: int
    num_blocks: int
    num_tokens: int


@dataclass(frozen=True)
class RecodesCancelled(Event):
    """Planned conversions of one group were dropped (holders gone or changed, or the executor failed)."""

    group: int
    num_units: int


@dataclass(frozen=True)
class TokensEvicted(Event):
    """Eviction dropped tokens of a running sequence that it had not dropped before, and as many blocks went.

    ``by_attention``: they were chosen by attention mass, not by age.
    """

    request_id: str
    num_tokens: int
    num_blocks: int
    by_attention: bool = False


@dataclass(frozen=True)
class PrefixBlocksDropped(Event):
    """Idle cached blocks were given up for room."""

    group: int
    num_blocks: int


@dataclass(frozen=True)
class TunablesApplied(Event):
    """Settings took effect at a step boundary; ``changes`` holds only those that differ."""

    changes: tuple[tuple[str, str | int], ...]


class EventSink(Protocol):
    """Takes events in order. Must be cheap, must not raise, must not call into the engine."""

    def emit(self, event: Event) -> None:
        """Take one event."""
        ...


class NullSink:
    """Drops everything."""

    def emit(self, event: Event) -> None:
        """Drop one event."""


@dataclass
class ListSink:
    """Keeps everything in order: tests."""

    events: list[Event] = field(default_factory=list)

    def emit(self, event: Event) -> None:
        """Keep one event."""
        self.events.append(event)

    def of(self, kind: type[Event]) -> list[Event]:
        """The events of one kind, in order."""
        return [event for event in self.events if isinstance(event, kind)]
