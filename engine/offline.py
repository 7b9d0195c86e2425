"""Run prompts to completion in one thread, without a server: evaluation, benchmarks and tests.

The same scheduler, cache manager and runner as behind the server, stepped until nothing is left.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.cache_manager import CacheManager
from engine.clock import Clock, RealClock
from engine.errors import EngineError
from engine.events import NullSink
from engine.links import EmulatedMover, Mover, host_arenas
from engine.loader import LoadedModel
from engine.model_runner import KernelOps, ModelRunner
from engine.plan import SequenceOutput, StepPlan, TokenLogprobs
from engine.prefix_policy import parity_tokens
from engine.request import CachePolicy, FinishReason, Request, SamplingParams
from engine.scheduler import MOST_EMPTY_STEPS, Scheduler
from engine.streaming import EmulatedStreamer
from engine.transfers import HostLink
from engine.tunables import TunableValue, default_values
from kernels import ops as default_ops


@dataclass
class OfflineResult:
    """What one prompt produced. ``logprobs`` per output token and ``prompt_logprobs`` per prompt token after the first,
    where asked for.
    """

    request: Request
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def output_ids(self) -> list[int]:
        return self.request.output_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.request.finish_reason


class OfflineEngine:
    """A loaded model with a KV pool, a scheduler and no server. Not thread safe.

    ``cache``, ``scheduler`` and ``runner`` are open to tests and evaluation, which look inside them between steps.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        pool_bytes: int,
        values: Mapping[str, TunableValue] | None = None,
        max_model_len: int | None = None,
        recent_tokens: int = 64,
        sinks: int = 16,
        sync_recode: bool = True,
        seed: int = 0,
        ops: KernelOps | None = None,
        clock: Clock | None = None,
        max_chunk_tokens: int | None = None,
        new_runner: Callable[..., ModelRunner] = ModelRunner,
        host_pool_bytes: int = 0,
        link: HostLink | None = None,
        staging_bytes: int = 0,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """``values``: tunables that differ from their defaults. ``sync_recode``: recode all that is due at every
        step, so that output depends on nothing but the requests and the settings. ``max_chunk_tokens``: most tokens of
        one prompt in one step. ``new_runner`` is called as :class:`ModelRunner` is. ``host_pool_bytes`` behind an
        emulated ``link`` make a host tier, from which blocks may be streamed through ``staging_bytes`` beside the pool;
        ``pause`` (seconds) is called when nothing can be done before a copy ends.

        Raises EngineError for a pool that is too small for the model.
        """
        self.loaded = loaded
        self.values = {**default_values(), **(values or {})}
        clock = clock or RealClock()
        try:
            self.cache = CacheManager(
                loaded.groups,
                pool_bytes,
                self.values,
                recent_tokens=recent_tokens,
                sinks=sinks,
                watermark=0.0,
                clock=clock,
                events=NullSink(),
                parity_tokens=parity_tokens(loaded.config.hidden_size),
                host_pool_bytes=host_pool_bytes,
                link=link,
                staging_bytes=staging_bytes,
            )
        except ValueError as error:
            raise EngineError(str(error)) from error
        self.scheduler = Scheduler(
            self.cache,
            self.values,
            max_model_len=max_model_len or loaded.config.max_model_len,
            max_waiting=1 << 30,
            clock=clock,
            counters=self.cache.counters,
            eos_token_ids=loaded.eos_token_ids,
            sync_recode=sync_recode,
            max_chunk_tokens=max_chunk_tokens,
        )
        arena_bytes = [self.cache.group_arena_bytes(group) for group in range(len(loaded.groups))]
        self.runner = new_runner(loaded, arena_bytes, ops or default_ops, rng=random.Random(seed))
        self.mover: Mover | None = None
        self.streamer: EmulatedStreamer | None = None
        if host_pool_bytes and link is not None:
            sizes = [self.cache.group_host_bytes(group) for group in range(len(loaded.groups))]
            hosts = host_arenas(sizes, loaded.model.device)
            mover = EmulatedMover(self.runner.arenas, hosts, link, clock, default_ops.copy_bytes)
            self.streamer = EmulatedStreamer(
                self.runner.arenas, hosts, mover.line, clock, default_ops.copy_bytes, pause=pause
            )
            self.runner.stream_with(self.streamer, self.cache.stream_places())
            self.mover = mover
        self._pause = pause
        self._clock = clock
        self._results: dict[Request, OfflineResult] = {}
        self._empty_steps = 0  # in a row

    def add(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, policy: CachePolicy | None = None
    ) -> OfflineResult:
        """Queue a prompt; its result fills up as steps run. Raises AdmissionError for one that can never run."""
        request = Request(
            f"offline-{len(self._results)}",
            list(prompt_ids),
            params,
            self._clock.now_ns(),
            cache=policy or CachePolicy(),
        )
        self.scheduler.add(request)
        result = self._results[request] = OfflineResult(request)
        return result

    def apply(self, **changes: TunableValue) -> None:
        """Change tunables, as an operator would between two steps."""
        self.values = {**self.values, **changes}
        self.scheduler.apply(self.values)

    def step(self) -> StepPlan:
        """Run one step and return what it did. Raises EngineError when nothing can move although requests wait."""
        if self.mover is not None:
            self.cache.finish_transfers(self.mover.arrived())
        plan = self.scheduler.schedule()
        if self.mover is not None:
            self.mover.submit(self.cache.plan_transfers())
        self.runner.recode(plan.recodes)
        outputs = self.runner.execute(plan, self.cache)
        work = self.runner.last_work
        self.cache.note_streamed(work.host_bytes_read, work.host_wait_ns)
        finished = self.scheduler.update(plan, outputs)
        self._record(outputs)  # only now: the scheduler strikes out what a recomputed prompt reports twice
        self._empty_steps = self._empty_steps + 1 if plan.is_empty and not finished else 0
        if self._empty_steps and self.scheduler.has_work:
            if self.mover is not None and self.cache.num_transfers:
                self._pause(self.mover.wait_ns() / 1e9)
                self._empty_steps = 0
            elif self._empty_steps >= MOST_EMPTY_STEPS:
                raise EngineError("the KV pool has no room for what is waiting; give the pool more bytes")
        return plan

    def settle(self) -> None:
        """Recode all that is due, now: a step of ``sync_recode`` still reads what it recodes as it was before."""
        while batches := self.cache.plan_recodes(0, sync=True):
            self.runner.recode(batches)
            self.cache.finish_recodes(batches)

    def run(self, after_step: Callable[[StepPlan], None] | None = None) -> None:
        """Step until nothing is left. ``after_step`` sees every plan and may change tunables or add prompts."""
        while self.scheduler.running or self.scheduler.waiting:
            plan = self.step()
            if after_step is not None:
                after_step(plan)

    def _record(self, outputs: Sequence[SequenceOutput]) -> None:
        for output in outputs:
            result = self._results[output.request]
            result.prompt_logprobs += output.prompt_logprobs
            if output.logprobs is not None:
                result.logprobs.append(output.logprobs)


def generate(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    pool_bytes: int,
    values: Mapping[str, TunableValue] | None = None,
    **options: Any,
) -> list[OfflineResult]:
    """Run prompts to completion together; ``options`` go to :class:`OfflineEngine`. Results in the prompts' order."""
    engine = OfflineEngine(loaded, pool_bytes=pool_bytes, values=values, **options)
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    results = [engine.add(prompt, one) for prompt, one in zip(prompts, each, strict=True)]
    engine.run()
    return results
