"""Who carries plans out: the model's runner, or a simulation's. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from engine.plan import RecodeBatch, SequenceOutput, StepPlan

if TYPE_CHECKING:
    from engine.cache_manager import CacheManager


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
