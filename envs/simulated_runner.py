"""A latency model in the place of the model: carries plans out by letting virtual time pass. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import mul
from typing import TYPE_CHECKING, cast

import numpy as np

from engine.formats import FORMATS
from engine.memory_model import GroupSpec
from engine.plan import RecodeBatch, SequenceOutput, StepPlan
from engine.request import Request
from engine.step_counts import STEP_INDEX, StepCounter, Stored
from envs.latency_model import FS_PER_NS, LatencyModel
from envs.ledger import Ledger
from envs.reward import QualityTable
from envs.sim_host import HostStreams
from envs.sim_request import SimRequest
from envs.synthetic_attention import SyntheticAttention
from envs.virtual_clock import VirtualClock

if TYPE_CHECKING:
    from engine.cache_manager import CacheManager


@dataclass(frozen=True)
class Jitter:
    """Steps take ``exp(deviation * normal)`` times as long as the model says; ``seed`` makes it repeatable."""

    deviation: float = 0.0
    seed: int = 0


@dataclass(slots=True)
class _Share:
    """One sequence's part of a run's steps: at position p it costs ``cost_fs + growth_fs * (p + 1)``, likewise bytes.

    ``start``: its position at the run's first step. ``version``: of its newest table. ``lost``: tokens that it attends,
    each times its loss; ``loss_evicted``: that of evicted ones then.
    """

    start: int = 0
    version: int = 0
    cost_fs: int = 0
    growth_fs: int = 0
    num_bytes: int = 0
    growth_bytes: int = 0
    lost: float = 0.0
    lost_since: int = 0
    loss_evicted: float = -1.0


@dataclass
class _Run:
    """Sums over the sequences of a run: step ``s`` attends for ``cost_fs + growth_fs * s``. ``is_new``: whether the
    next step is the first over these sequences.
    """

    requests: dict[Request, _Share] = field(default_factory=dict)
    cost_fs: int = 0
    growth_fs: int = 0
    num_bytes: int = 0
    growth_bytes: int = 0
    steps: int = 0
    late: int = 0
    last_ns: int = 0
    tokens: int = 0
    bytes_read: int = 0
    is_new: bool = True


class SimulatedRunner:
    """:class:`engine.runner.Runner` and :class:`engine.decode_run.Pace` in one: both give the same times, to the
    nanosecond.
    """

    def __init__(
        self,
        model: LatencyModel,
        groups: Sequence[GroupSpec],
        clock: VirtualClock,
        ledger: Ledger,
        quality: QualityTable,
        jitter: Jitter | None = None,
        streams: HostStreams | None = None,
    ) -> None:
        """``streams``: how blocks on the host are attended, where there is a host."""
        self.model = model
        self.kv_bytes_read = 0
        self.kv_bytes_written = 0
        self.host_bytes_read = 0
        self.host_wait_ns = 0
        self._streams = streams
        self._clock = clock
        self._ledger = ledger
        self._counter = StepCounter(groups, knee_tokens=model.knee_tokens)
        self._attention = SyntheticAttention(len(groups))
        self._loss = [quality.by_format[kind.name] for kind in FORMATS]
        self._quality = quality
        self._loss_evicted = quality.evicted
        self._jitter = jitter or Jitter()
        self._random = np.random.default_rng(self._jitter.seed)
        self._tables: CacheManager | None = None
        self._run = _Run()
        prices = model.step_fs
        self._kv_fs = [prices[STEP_INDEX[f"decode_kv_{kind.name}"]] for kind in FORMATS]
        self._block_fs = prices[STEP_INDEX["decode_block"]]
        self._step_fs = prices[STEP_INDEX["step"]]
        self._sequence_fs = prices[STEP_INDEX["decode_sequence"]] + prices[STEP_INDEX["sample"]]
        self._beyond_fs = prices[STEP_INDEX["token_beyond_knee"]]
        self._regrouped_fs, self._after_chunk_fs = prices[STEP_INDEX["regrouped"]], prices[STEP_INDEX["after_chunk"]]
        self._layer_shares = [layers / sum(self._counter.layers) for layers in self._counter.layers]

    @property
    def last_work(self) -> SimulatedRunner:
        """KV bytes of the last step."""
        return self

    # -- one step at a time ---------------------------------------------------------------------------------------

    def recode(self, batches: Sequence[RecodeBatch]) -> None:
        self._clock.advance_ns(self._jittered(self.model.recode_ns(self._counter.recode(batches))))

    def execute(self, plan: StepPlan, cache: CacheManager) -> list[SequenceOutput]:
        self._tables = cache
        self._loss_evicted = self._quality.loss_evicted(cache.eviction)
        counter, ledger = self._counter, self._ledger
        elapsed_ns = self._jittered(self.model.step_ns(counter.step(plan.sequences, cache)))
        if self._streams is None:
            self._clock.advance_ns(elapsed_ns)
        else:
            self.host_bytes_read, self.host_wait_ns = self._streams.run(elapsed_ns, plan.sequences, cache)
        now_ns = self._clock.now_ns()
        self.kv_bytes_read, self.kv_bytes_written = counter.kv_bytes_read, counter.kv_bytes_written
        outputs = []
        requests = cast("list[SimRequest]", [sequence.request for sequence in plan.sequences])
        for request, sequence in zip(requests, plan.sequences, strict=True):
            mass = None
            if sequence.observed:
                mass = self._attention.of(request, sequence.start + sequence.num_tokens, sequence.observed)
            if not sequence.samples:
                outputs.append(SequenceOutput(request, mass=mass))
                continue
            outputs.append(SequenceOutput(request, request.token, mass=mass))
            ledger.token(request, now_ns)
            lost = self._lost(request, counter.counted(request))
            if lost:
                ledger.figures.quality_charge += lost / (sequence.start + sequence.num_tokens)
        return outputs

    def _jittered(self, duration_ns: int) -> int:
        if not self._jitter.deviation:
            return duration_ns
        return round(duration_ns * math.exp(self._jitter.deviation * self._random.standard_normal()))

    def _lost(self, request: Request, stored: Sequence[Stored]) -> float:
        """Tokens that a sequence attends times their loss, evicted ones included; mean over layers."""
        lost = request.num_evicted_tokens * self._loss_evicted
        for share, group in zip(self._layer_shares, stored, strict=True):
            if not group.is_native:
                lost += share * sum(map(mul, self._loss, group.tokens))
        return lost

    @property
    def _cache(self) -> CacheManager:
        if self._tables is None:
            raise RuntimeError("no step has been run yet")
        return self._tables

    # -- runs of decode steps -------------------------------------------------------------------------------------

    def begin(self, requests: Sequence[Request], positions: Sequence[int]) -> None:
        run = self._run = _Run()
        self._loss_evicted = self._quality.loss_evicted(self._cache.eviction)
        for request, start in zip(requests, positions, strict=True):
            mine = cast("SimRequest", request)
            share = mine.share
            if share is None:
                share = mine.share = _Share()
            share.start, share.lost_since = start, 0
            run.requests[request] = share
            self._price(request, share)
            self._put_in(share)

    def changed(self, request: Request) -> None:
        share = self._run.requests[request]
        self._take_out(share)
        self._charge(share)
        self._price(request, share)
        self._put_in(share)

    def _price(self, request: Request, share: _Share) -> None:
        """Read the request's tables, if they have changed since the last look."""
        counter, tables = self._counter, self._cache
        # Versions come from one counter for all tables, so the newest tells of any change.
        version = max([tables.table(request, group).version for group in range(len(counter.layers))])
        if version == share.version and self._loss_evicted == share.loss_evicted:
            return
        share.version, share.loss_evicted = version, self._loss_evicted
        cost = growth = num_bytes = growth_bytes = 0
        parts = counter.stored(request, tables)
        for layers, token_bytes, stored in zip(counter.layers, counter.token_bytes, parts, strict=True):
            last, tokens = stored.last_code, stored.tokens
            cost += layers * (self._block_fs * stored.num_entries - self._kv_fs[last] * stored.last_first)
            growth += layers * self._kv_fs[last]
            num_bytes -= token_bytes[last] * stored.last_first
            growth_bytes += token_bytes[last]
            if stored.is_native:
                cost += layers * self._kv_fs[last] * tokens[last]
                num_bytes += token_bytes[last] * tokens[last]
            else:
                cost += layers * sum(map(mul, self._kv_fs, tokens))
                num_bytes += sum(map(mul, token_bytes, tokens))
        share.cost_fs, share.growth_fs, share.num_bytes, share.growth_bytes = cost, growth, num_bytes, growth_bytes
        share.lost = self._lost(request, parts)

    def _put_in(self, share: _Share) -> None:
        run = self._run
        run.cost_fs += share.cost_fs + share.growth_fs * (share.start + 1)
        run.growth_fs += share.growth_fs
        run.num_bytes += share.num_bytes + share.growth_bytes * (share.start + 1)
        run.growth_bytes += share.growth_bytes

    def _take_out(self, share: _Share) -> None:
        run = self._run
        run.cost_fs -= share.cost_fs + share.growth_fs * (share.start + 1)
        run.growth_fs -= share.growth_fs
        run.num_bytes -= share.num_bytes + share.growth_bytes * (share.start + 1)
        run.growth_bytes -= share.growth_bytes

    def _charge(self, share: _Share) -> None:
        """Charge the loss of the tokens since the sequence last changed: ``lost`` over each one's context."""
        if share.lost and self._run.steps > share.lost_since:
            first, last = share.start + share.lost_since, share.start + self._run.steps
            self._ledger.figures.quality_charge += share.lost * (_harmonic(last) - _harmonic(first))
        share.lost_since = self._run.steps

    def left(self, request: Request, position: int) -> None:
        del position
        share = self._run.requests.pop(request)
        self._run.is_new = True
        self._charge(share)
        self._take_out(share)
        self._settle(cast("SimRequest", request))
        self._ledger.ended(cast("SimRequest", request), "completed")

    def _settle(self, request: SimRequest) -> None:
        request.late_gaps += self._run.late

    def _regroup_fs(self) -> int:
        """What the next step costs for being the first over its sequences."""
        run = self._run
        if not run.is_new:
            return 0
        run.is_new = False
        regrouped, after_chunk = self._counter.decoded_next(list(run.requests))
        return self._regrouped_fs * regrouped + self._after_chunk_fs * after_chunk

    def step(self) -> int:
        run, ledger = self._run, self._ledger
        number = len(run.requests)
        fixed = self._step_fs + number * self._sequence_fs
        if number > self.model.knee_tokens:
            fixed += (number - self.model.knee_tokens) * self._beyond_fs
        fixed += self._regroup_fs()
        elapsed_ns = (fixed + run.cost_fs + run.growth_fs * run.steps) // FS_PER_NS
        if self._jitter.deviation:
            elapsed_ns = self._jittered(elapsed_ns)
        run.bytes_read += run.num_bytes + run.growth_bytes * run.steps
        run.tokens += number
        now_ns = self._clock.advance_ns(elapsed_ns)
        if run.steps:
            gap_ns = now_ns - run.last_ns  # recoding included
            ledger.gaps(gap_ns, number)
            run.late += gap_ns > ledger.tbt_ns
        else:  # before the run they may have had their tokens at different times
            for request in run.requests:
                ledger.token(cast("SimRequest", request), now_ns)
        run.steps += 1
        run.last_ns = now_ns
        return now_ns

    def steps(self, most: int, until_ns: int) -> list[int]:
        run, ledger = self._run, self._ledger
        number, begin = len(run.requests), run.steps
        first_fs = run.cost_fs + self._step_fs + number * self._sequence_fs
        first_fs += max(0, number - self.model.knee_tokens) * self._beyond_fs
        growth_fs, is_even, once_fs = run.growth_fs, not self._jitter.deviation, self._regroup_fs()
        now_ns, gaps = self._clock.now_ns(), list[int]()
        for step in range(begin, begin + most):
            elapsed_ns = (first_fs + once_fs + growth_fs * step) // FS_PER_NS
            once_fs = 0
            if not is_even:
                elapsed_ns = self._jittered(elapsed_ns)
            gaps.append(elapsed_ns)
            now_ns += elapsed_ns
            if now_ns >= until_ns:
                break
        self._clock.move_to_ns(now_ns)
        done = len(gaps)
        run.bytes_read += done * run.num_bytes + run.growth_bytes * (done * begin + done * (done - 1) // 2)
        run.tokens += done * number
        run.late += ledger.all_gaps(gaps, number)
        run.steps, run.last_ns = begin + done, now_ns
        return gaps

    def tokens(self, request: Request, number: int) -> list[int]:
        return [cast("SimRequest", request).token] * number

    def end(self) -> tuple[int, int]:
        run = self._run
        for request, share in run.requests.items():
            self._charge(share)
            self._settle(cast("SimRequest", request))
        self._run = _Run()
        return run.bytes_read, run.tokens * self._counter.native_bytes


def _harmonic(number: int) -> float:
    """1 + 1/2 + ... + 1/number less Euler's constant; good to 1e-12 from 16 on, exact to rounding below."""
    if number < 16:
        return sum(1 / i for i in range(1, number + 1)) - 0.5772156649015329
    inverse = 1 / number
    square = inverse * inverse
    return math.log(number) + inverse / 2 - square / 12 + square * square / 120 - square * square * square / 252
