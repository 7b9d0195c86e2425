"""What bookkeeping hands to an executor: lists of operations, decided before anything is done. No torch.

One step is, in this order: free what ended, recode (background), write new KV, attend, sample. The same plans drive
the real model runner and the simulator's latency model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.attention_mass import ObservedMass
from engine.request import Request

RecodeJob = tuple[int, int, int, int, int, int, int, int]  # columns: kernels.layout.JOB_*


class Entry(NamedTuple):
    """One block of a sequence's block table, or a run of its tiles (ADR 6), as an executor sees it.

    ``offset``: of its first tile, in units of 256 bytes. ``format_code``: kernels.layout.KVFormat.code. ``first``:
    absolute position of its first token, at a tile's start. ``valid``: tokens that belong to this sequence. Never
    compute position // block_size: consecutive entries may differ in size and format, and an evicted range is a gap.
    ``on_host``: the offset is one of the host's arena, and the block has to be streamed.
    """

    offset: int
    format_code: int
    first: int
    valid: int
    on_host: bool = False


@dataclass(slots=True)  # not frozen: that takes twice as long to make, and simulations make a million of them
class ScheduledSequence:
    """Compute tokens ``start .. start + num_tokens`` of a request; sample from the last one if ``samples``.

    ``observed``: of how many of the last of them the attention is wanted, see ``SequenceOutput.mass``.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool
    observed: int = 0

    @property
    def is_decode(self) -> bool:
        return self.num_tokens == 1 and self.start >= len(self.request.prompt_ids)


@dataclass(frozen=True)
class RecodeBatch:
    """Tile conversions of one layer group, done before this step's writes; ``num_tokens`` of budget they used."""

    group: int
    jobs: tuple[RecodeJob, ...]
    num_tokens: int


@dataclass(frozen=True)
class StepPlan:
    """What to run in one step: decode sequences first, then prefill chunks."""

    sequences: tuple[ScheduledSequence, ...] = ()
    recodes: tuple[RecodeBatch, ...] = ()
    preempted: tuple[Request, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum([sequence.num_tokens for sequence in self.sequences])

    @property
    def is_empty(self) -> bool:
        return not self.sequences and not self.recodes


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probability and rank of one token and of the top alternatives, natural logarithm."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class SequenceOutput:
    """What one scheduled sequence produced in a step.

    ``token_id`` is None for a prefill chunk that does not end the prompt. ``prompt_logprobs`` are for the prompt
    tokens whose predecessor was computed in this step, in order (the first prompt token has none). ``mass``: attention
    of the observed queries; None where none were asked for, or from an executor that computes no attention.
    """

    request: Request
    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    mass: ObservedMass | None = None
