"""``throughput_256_over_128``: output tokens per second with 256 sequences running over those with 128.

Two engines with the whole model, one of each concurrency, run requests of random lengths (prompts uniform in 16 to
128 tokens, outputs in 64 to 192), a new one for every one that ends. Each has five windows of some thousand output
tokens, and the medians are divided. Inside a window they take turns every few steps, so that another load on the
machine hits both. Windows begin after as many requests have ended as run at once, so that pools and tables are as
scattered as in service, and prompts are computed inside them. The literature reports a loss of 37 % beyond 128
sessions through fragmentation; what is promised is 0.95 or more.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import median

from engine.cache_bench.context import Context
from engine.clock import Clock, RealClock
from engine.loader import LoadedModel
from engine.memory_model import token_bytes
from engine.offline import OfflineEngine
from engine.request import SamplingParams

KEYS = ("throughput_256_over_128", "throughput_detail")

_CONCURRENCIES = (128, 256)
_PROMPT_TOKENS = (16, 128)
_OUTPUT_TOKENS = (64, 192)
_POOL_TOKENS = 256  # per running sequence: little more than the mean of a whole one, so that the pool is well filled
_WINDOWS = 5
_WINDOW_TOKENS = 3072
_QUICK_WINDOW_TOKENS = 512
_TURN_TOKENS = 512


def run(context: Context) -> dict[str, object]:
    """The ratio of medians, and both medians with their windows."""
    loads = {number: ClosedLoop(context.load(), number, context.seed, RealClock()) for number in _CONCURRENCIES}
    for number, load in loads.items():
        load.warm_up(number // 8 if context.quick else number)
    rates: dict[int, list[float]] = {number: [] for number in _CONCURRENCIES}
    turns = (_QUICK_WINDOW_TOKENS if context.quick else _WINDOW_TOKENS) // _TURN_TOKENS
    for _ in range(_WINDOWS):
        for number, rate in zip(loads, window(list(loads.values()), turns), strict=True):
            rates[number].append(rate)
    low, high = (median(rates[number]) for number in _CONCURRENCIES)
    detail = {f"tokens_per_s_{number}": [round(rate) for rate in found] for number, found in rates.items()}
    return {"throughput_256_over_128": round(high / low, 3), "throughput_detail": detail}


def window(loads: Sequence[ClosedLoop], turns: int) -> list[float]:
    """Output tokens per second of each load over its turns."""
    done = [[load.turn(_TURN_TOKENS) for load in loads] for _ in range(turns)]
    return [sum(tokens for tokens, _ in own) / sum(ns for _, ns in own) * 1e9 for own in zip(*done, strict=True)]


class ClosedLoop:
    """An engine in which always ``concurrency`` requests of random lengths are under way."""

    def __init__(self, loaded: LoadedModel, concurrency: int, seed: int, clock: Clock) -> None:
        per_token = sum(token_bytes(group.shape) for group in loaded.groups)
        self.concurrency = concurrency
        self.engine = OfflineEngine(
            loaded,
            pool_bytes=int(concurrency * _POOL_TOKENS * per_token),
            values={"max_num_seqs": concurrency, "max_num_batched_tokens": 2048},
            clock=clock,
        )
        self._vocabulary = loaded.config.vocab_size
        self._clock = clock
        self._rng = random.Random(seed)
        for _ in range(concurrency):
            self._add(self._rng.random())  # as if found in the middle of their lives

    def warm_up(self, requests: int) -> None:
        """Run until so many requests have ended."""
        counters = self.engine.scheduler.counters
        stop = counters.requests_completed + requests
        while counters.requests_completed < stop:
            self._step()

    def turn(self, tokens: int) -> tuple[int, int]:
        """Run until so many tokens more have been generated; how many it were, and the nanoseconds."""
        counters = self.engine.scheduler.counters
        first, begin_ns = counters.generation_tokens, self._clock.now_ns()
        while counters.generation_tokens < first + tokens:
            self._step()
        return counters.generation_tokens - first, self._clock.now_ns() - begin_ns

    def _step(self) -> None:
        scheduler = self.engine.scheduler
        for _ in range(self.concurrency - len(scheduler.running) - scheduler.num_waiting):
            self._add(1.0)
        self.engine.step()

    def _add(self, share: float) -> None:
        prompt = [self._rng.randrange(self._vocabulary) for _ in range(self._rng.randint(*_PROMPT_TOKENS))]
        output = max(1, round(share * self._rng.randint(*_OUTPUT_TOKENS)))
        self.engine.add(prompt, SamplingParams(max_tokens=output, ignore_eos=True))
