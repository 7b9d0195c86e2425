"""Runs of steps in which nothing happens but decoding, without planning each one. For simulation; no torch.

In such a *run* every running request computes one token per step and nothing can be admitted. What a step would do to
the books is then known beforehand: tokens and times add up, and block allocations, chunk commits and endings come at
steps that can be computed. Those, and what is recoded, are applied by the same methods and in the same order as
stepping applies them, so a run changes no result; it ends before the first step that would need a decision.

Outputs are the pace's business: requests in a run must not be able to stop early (no end-of-sequence token).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from engine.clock import Clock
from engine.core_stats import CoreStats, LiveRequest
from engine.formats import CHUNK_TOKENS
from engine.plan import RecodeBatch
from engine.recode_pacer import RecodePacer
from engine.request import Request

if TYPE_CHECKING:
    from engine.scheduler import Scheduler

_NEVER: Final = 1 << 62


class Pace(Protocol):
    """Says how long the steps of a run take, and moves the clock."""

    def begin(self, requests: Sequence[Request], positions: Sequence[int]) -> None:
        """A run begins: the tokens at these positions come next."""
        ...

    def changed(self, request: Request) -> None:
        """The request's block table may have changed."""
        ...

    def left(self, request: Request, position: int) -> None:
        """The request has ended; ``position`` would have been its next token."""
        ...

    def recode(self, batches: Sequence[RecodeBatch]) -> None:
        """Run the conversions of the step that comes."""
        ...

    def step(self) -> int:
        """Run one step over all that are left; returns the clock's time after it in nanoseconds."""
        ...

    def steps(self, most: int, until_ns: int) -> list[int]:
        """As many times :meth:`step`, or until the clock has reached ``until_ns``; returns how long each took. Not for
        the first step of a run.
        """
        ...

    def tokens(self, request: Request, number: int) -> list[int]:
        """The next ``number`` output tokens of a request."""
        ...

    def end(self) -> tuple[int, int]:
        """The run is over; returns the KV bytes that attention covered in it, and those written."""
        ...


class DecodeRun:
    """One run. ``done``: steps so far."""

    def __init__(
        self,
        scheduler: Scheduler,
        requests: Sequence[Request],
        live: Mapping[str, LiveRequest],
        stats: CoreStats,
        pace: Pace,
        clock: Clock,
        pacer: RecodePacer | None,
    ) -> None:
        self.done = 0
        self.finished: list[Request] = []
        self._scheduler, self._cache = scheduler, scheduler.cache
        self._pace, self._stats = pace, stats
        self._requests = list(requests)
        self._records = [live[request.request_id] for request in requests]
        self._starts = [request.num_computed_tokens for request in requests]
        self._clock, self._now_ns = clock, clock.now_ns()
        self._pacer = pacer
        # While nothing can become stale, evicted, hidden or cached, a commit does the same whenever it comes: once, at
        # the end.
        self._is_lazy = self._cache.is_quiet() and not any(request.cache.use_prefix_cache for request in requests)
        self._may_recode = scheduler.recodes
        self._slots_end = [self._cache.capacity(r) - start for r, start in zip(requests, self._starts, strict=True)]
        self._ends = [scheduler.tokens_left(request) for request in requests]
        self._next_slot = min(self._slots_end)
        self._next_end = min(self._ends) - 1
        # Otherwise chunks are committed when they are full. Settings may have changed since the last commit, so the
        # first step commits all, whatever their position.
        self._commits = [_NEVER if self._is_lazy else 0] * len(self._requests)
        self._next_commit = self._commits[0]

    def run(self, until_ns: int) -> None:
        """Step until the clock has reached ``until_ns``, nobody is left, or a decision is due."""
        scheduler, pace, stats, pacer = self._scheduler, self._pace, self._stats, self._pacer
        is_lazy, is_silent = self._is_lazy, scheduler.is_silent
        pace.begin(self._requests, self._starts)
        number, tokens, step_ns = len(self._requests), 0, 0
        recodes: tuple[RecodeBatch, ...] = ()
        while self._next_slot > self.done or self._allocate():
            if is_lazy and self._may_recode:
                break  # conversions look at every sequence, and these are behind with their commits
            if self.done and pacer is None and is_silent and (is_lazy or not scheduler.recodes):
                most = min(self._next_slot, self._next_end, self._next_commit) - self.done
                if most > 0:
                    gaps = pace.steps(most, until_ns)
                    stats.all_gaps(gaps, number)
                    self.done += len(gaps)
                    tokens += number * len(gaps)
                    step_ns += sum(gaps)
                    self._now_ns = self._clock.now_ns()
                    if self._now_ns >= until_ns:
                        break
                    continue
            before_ns = begin_ns = self._now_ns
            if pacer is not None:
                scheduler.set_recode_budget(pacer.budget_tokens())
            if not is_lazy:
                recodes = self._plan_recodes() if scheduler.recodes else ()
            if not is_silent:
                scheduler.report_decodes(number, sum(batch.num_tokens for batch in recodes), before_ns)
            if recodes:
                begin_ns = self._recode(recodes)
            self._now_ns = now_ns = pace.step()
            step_ns += now_ns - begin_ns
            if pacer is not None:
                recoded = max((batch.num_tokens for batch in recodes), default=0)
                pacer.observe(now_ns - begin_ns, begin_ns - before_ns, recoded)
            step = self.done
            if step:
                stats.gaps(now_ns - before_ns, number)
            else:  # before the run they may have had their tokens at different times
                stats.tokens(self._records, now_ns)
            tokens += number
            self.done = step + 1
            has_news = bool(recodes)
            if step == self._next_commit or step == self._next_end:  # noqa: PLR1714  # twice as fast as a set
                self._commit(step)
                number, has_news = len(self._requests), True
            if recodes:
                self._finish_recodes(recodes)
            if now_ns >= until_ns or (has_news and not (number and scheduler.is_settled)):
                break
        self._catch_up()
        self._count(tokens, step_ns, *pace.end())

    def _plan_recodes(self) -> tuple[RecodeBatch, ...]:
        """What the coming step converts. Which blocks still grow is seen by how far their holders are."""
        for request, start in zip(self._requests, self._starts, strict=True):
            self._cache.note_computed(request, start + self.done, start + self.done + 1)
        return self._scheduler.plan_recodes()

    def _finish_recodes(self, batches: Sequence[RecodeBatch]) -> None:
        for request, start in zip(self._requests, self._starts, strict=True):
            self._cache.note_computed(request, start + self.done, start + self.done)
        self._cache.finish_recodes(batches)
        for request in self._requests:
            self._pace.changed(request)

    def _recode(self, batches: Sequence[RecodeBatch]) -> int:
        """Run a step's conversions; returns when they are done."""
        self._pace.recode(batches)
        now_ns = self._clock.now_ns()
        self._stats.counters.recode_time_ns += now_ns - self._now_ns
        return now_ns

    def _allocate(self) -> bool:
        """Blocks for the coming step; False when that, or what follows from it, takes a decision."""
        step = self.done
        for index, request in enumerate(self._requests):
            if self._slots_end[index] == step:
                request.num_computed_tokens = self._starts[index] + step
                if not self._cache.allocate(request, 1):
                    return False
                self._slots_end[index] = self._cache.capacity(request) - self._starts[index]
                self._pace.changed(request)
        self._next_slot = min(self._slots_end)
        self._may_recode = self._scheduler.recodes
        return self._scheduler.is_settled and (not self._is_lazy or self._cache.is_quiet())

    def _count(self, tokens: int, elapsed_ns: int, bytes_read: int, bytes_written: int) -> None:
        counters = self._stats.counters
        counters.steps += self.done
        counters.step_time_ns += elapsed_ns
        counters.decode_time_ns += elapsed_ns
        counters.decode_tokens_computed += tokens
        counters.generation_tokens += tokens
        counters.kv_bytes_read += bytes_read
        counters.kv_bytes_written += bytes_written

    def _commit(self, step: int) -> None:
        """What the step's results do to the books, request by request, as in ``Scheduler.update``."""
        for index, request in enumerate(self._requests):
            ends = self._ends[index] == step + 1
            if not ends and self._commits[index] != step:
                continue
            stop = self._starts[index] + step + 1
            self._take_tokens(request, stop)
            self._cache.commit_run(request, stop)
            if ends:
                self._end(request, index, stop)
            else:
                self._commits[index] = step + CHUNK_TOKENS - stop % CHUNK_TOKENS
                self._pace.changed(request)
        if self._next_end == step:
            self._drop_ended(step)
            self._may_recode = self._scheduler.recodes
        self._next_commit = min(self._commits, default=_NEVER)

    def _end(self, request: Request, index: int, stop: int) -> None:
        self._touch(request, index, stop)
        self._scheduler.complete(request)
        self._stats.completed(request, self._now_ns)
        self._pace.left(request, stop)
        self.finished.append(request)

    def _drop_ended(self, step: int) -> None:
        stays = [index for index, end in enumerate(self._ends) if end != step + 1]
        self._requests = [self._requests[index] for index in stays]
        self._records = [self._records[index] for index in stays]
        self._starts = [self._starts[index] for index in stays]
        self._slots_end = [self._slots_end[index] for index in stays]
        self._ends = [self._ends[index] for index in stays]
        self._commits = [self._commits[index] for index in stays]
        self._next_slot = min(self._slots_end, default=_NEVER)
        self._next_end = min(self._ends, default=_NEVER) - 1

    def _take_tokens(self, request: Request, stop: int) -> None:
        """Everything known of a request but its last token is computed, so that many output tokens it has."""
        missing = stop + 1 - request.num_tokens
        if missing > 0:
            request.output_ids += self._pace.tokens(request, missing)

    def _touch(self, request: Request, index: int, stop: int) -> None:
        request.num_computed_tokens = stop
        request.last_token_ns = self._now_ns
        record = self._records[index]
        record.high_water = max(record.high_water, stop)
        record.last_token_ns = self._now_ns

    def _catch_up(self) -> None:
        """Leave the books of those that still run as if every step had been taken singly."""
        if not self.done:
            for request, start in zip(self._requests, self._starts, strict=True):
                request.num_computed_tokens = start
            return
        for index, request in enumerate(self._requests):
            stop = self._starts[index] + self.done
            self._take_tokens(request, stop)
            self._cache.commit_run(request, stop)
            self._touch(request, index, stop)
