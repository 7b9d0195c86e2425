"""The real scheduler and cache without a model: every step's tokens cost nothing and are made up. No torch."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from engine.cache_manager import CacheManager
from engine.clock import ManualClock
from engine.events import NullSink
from engine.memory_model import GroupSpec
from engine.plan import SequenceOutput, StepPlan
from engine.request import Request, SamplingParams
from engine.scheduler import Scheduler
from engine.tunables import TunableValue, default_values

_VOCABULARY = 1 << 15


class DryEngine:
    """Scheduler and cache under a clock that stands still. ``recode_tokens``: KV recoded per step."""

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        pool_bytes: int,
        values: Mapping[str, TunableValue],
        rng: random.Random,
        *,
        max_model_len: int,
        recode_tokens: int,
        recent_tokens: int = 64,
    ) -> None:
        self._clock = ManualClock()
        self._rng = rng
        self._added = 0
        settings = {**default_values(), **values}
        self.cache = CacheManager(
            groups,
            pool_bytes,
            settings,
            recent_tokens=recent_tokens,
            sinks=16,
            watermark=0.01,
            clock=self._clock,
            events=NullSink(),
        )
        self.scheduler = Scheduler(
            self.cache,
            settings,
            max_model_len=max_model_len,
            max_waiting=1 << 30,
            clock=self._clock,
            recode_tokens_per_step=recode_tokens,
        )

    def add(self, prompt_tokens: int, output_tokens: int) -> Request:
        """Queue a prompt of random tokens, so that nothing is shared. Raises AdmissionError if it can never run."""
        self._added += 1
        prompt = [self._rng.randrange(_VOCABULARY) for _ in range(prompt_tokens)]
        params = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
        request = Request(f"dry-{self._added}", prompt, params, self._clock.now_ns())
        self.scheduler.add(request)
        return request

    def step(self) -> StepPlan:
        """Plan a step and take it as done."""
        plan = self.scheduler.schedule()
        outputs = [
            SequenceOutput(sequence.request, self._rng.randrange(_VOCABULARY) if sequence.samples else None)
            for sequence in plan.sequences
        ]
        self.scheduler.update(plan, outputs)
        return plan
