"""Who computes what in the next step: running requests, at others' expense if need be, then those admitted. No torch.

One step's token budget goes to decodes first, then to prefills that are under way, then to admissions.
"""

from __future__ import annotations

from engine.admitter import Admitter
from engine.cache_manager import CacheManager
from engine.finisher import Finisher
from engine.preemptor import Preemptor
from engine.queues import Queues
from engine.request import Request, RequestStatus
from engine.step_draft import StepDraft
from engine.tunables import TunableValues, parse_change


class StepPlanner:
    """Works on the scheduler's queues and cache. ``max_seqs``: requests that may be admitted at a time."""

    def __init__(
        self,
        queues: Queues,
        cache: CacheManager,
        preemptor: Preemptor,
        admitter: Admitter,
        finisher: Finisher,
        *,
        limits: tuple[int, int],
        max_chunk_tokens: int | None,
    ) -> None:
        """``limits``: see :func:`parse_limits`. ``max_chunk_tokens``: most tokens of one sequence in one step."""
        self._queues = queues
        self._cache = cache
        self._preemptor = preemptor
        self._admitter = admitter
        self._finisher = finisher
        self.max_batched, self.max_seqs = limits
        self._max_chunk = max_chunk_tokens
        self._served_to = 0  # where decoding goes on when the budget is smaller than the number of decodes

    def plan(self) -> StepDraft:
        """The next step, with slots allocated."""
        draft = StepDraft(self.max_batched, self._max_chunk)
        queues, admitter = self._queues, self._admitter
        if queues.loading:
            admitter.start_loaded()
        decoding: list[Request] = []
        prefilling: list[Request] = []
        for request in queues.running:
            known = len(request.prompt_ids) + len(request.output_ids)
            (decoding if known - request.num_computed_tokens == 1 else prefilling).append(request)
        if len(decoding) > draft.budget:
            # Whoever had to wait goes first next time; without this the youngest would starve.
            start = self._served_to % len(decoding)
            decoding = decoding[start:] + decoding[:start]
            self._served_to = start + draft.budget
        take_slot = self._cache.take_slot
        for request in decoding:
            if draft.budget and request.status is RequestStatus.RUNNING:
                if take_slot(request):  # the usual case
                    draft.put(request, 1, 1)
                else:
                    self._continue(request, 1, draft)
        for request in prefilling:
            if draft.budget and request.status is RequestStatus.RUNNING:
                self._continue(request, request.num_uncomputed_tokens, draft)
        if not draft.preempted:
            while draft.budget and queues.num_active < self.max_seqs and admitter.admit_next(draft):
                pass
        return draft

    def _continue(self, request: Request, missing: int, draft: StepDraft) -> None:
        """Schedule a running request that misses so many tokens, at the expense of younger ones if the pool is full."""
        cache, queues, preemptor = self._cache, self._queues, self._preemptor
        num_tokens = draft.part(missing)
        while not cache.allocate(request, num_tokens):
            if queues.loading:
                preemptor.stop_loading(queues.loading[-1])
                continue
            if cache.is_room_coming(request, num_tokens):
                return
            if preemptor.lose_youngest_parked() or cache.press(request, num_tokens, reversed(queues.running)):
                continue
            victim = queues.running[-1]
            if victim is not request:
                preemptor.preempt(victim, draft)
                continue
            if len(queues.running) == 1:
                if cache.allocate(request, num_tokens, use_reserve=True):
                    break
                self._start_over(request, draft)
            elif missing == 1:
                preemptor.preempt(request, draft)
            return  # a prefill that is youngest waits for the others, keeping what it has
        draft.put(request, num_tokens, missing)

    def _start_over(self, request: Request, draft: StepDraft) -> None:
        """Alone, and no room even with the reserve: mixed block sizes waste some. Start over, or give up for good."""
        if self._cache.can_ever_fit(request.num_tokens):
            self._preemptor.preempt(request, draft, may_park=False)
            self._cache.drop_idle()
        else:
            self._finisher.fail(request)

    def is_steady(self) -> bool:
        """Whether the next step would give a token to every running request that needs one, and decide nothing."""
        queues = self._queues
        if not queues.running or len(queues.running) > self.max_batched or self._finisher.failed:
            return False
        # Copies end and pins expire at times of their own.
        return self.is_settled and not queues.loading and not len(self._cache.pins)

    @property
    def is_settled(self) -> bool:
        """Whether the next plan would admit nobody, as long as running requests only decode."""
        queues = self._queues
        if not (queues.preempted or queues.waiting):
            return True
        running = len(queues.running)
        if running >= self.max_seqs or running >= self.max_batched:
            return True
        return queues.blocked_at == (self._cache.room_version, running)

    @property
    def wanted_tokens(self) -> int:
        """Native room that the queue's head waits for, 0 where it waits for nothing or for something else."""
        queues = self._queues
        return queues.blocked_tokens if queues.blocked_at is not None and queues.num_active < self.max_seqs else 0


def parse_limits(values: TunableValues) -> tuple[int, int]:
    """``max_num_batched_tokens`` and ``max_num_seqs``. Raises ValueError for values that are not offered."""
    return (
        int(parse_change("max_num_batched_tokens", values["max_num_batched_tokens"])),
        int(parse_change("max_num_seqs", values["max_num_seqs"])),
    )
