"""Runs known text through one engine: every step yields the predictions of the tokens that come next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.attention import StepInputs
from engine.clock import Clock
from engine.errors import EngineError
from engine.loader import LoadedModel
from engine.memory_model import MIN_SLABS, slab_bytes, token_bytes
from engine.model_runner import ModelRunner
from engine.offline import OfflineEngine
from engine.plan import SequenceOutput
from engine.quality.samples import Sample
from engine.request import CachePolicy, Request, SamplingParams
from engine.tunables import TUNABLES, TunableValue

_BLOCK_SLACK = 2 * 256  # tokens of a sequence that lie in half-empty blocks, at most
_POOL_MARGIN = 1.25


@dataclass(frozen=True)
class Conditions:
    """How text is fed: ``chunk_tokens`` of each of ``batch`` sequences per step, everything older than
    ``recent_tokens`` recoded before the next step, native below that.
    """

    chunk_tokens: int = 32
    recent_tokens: int = 64
    sinks: int = 16
    batch: int = 8


@dataclass(frozen=True)
class Predictions:
    """Log-probabilities float32 [rows, vocab] of what comes at ``positions`` of ``samples``, really ``targets``.

    These three are int64 [rows].
    """

    samples: Tensor
    positions: Tensor
    targets: Tensor
    logprobs: Tensor


class _ForcingRunner(ModelRunner):
    """A runner that samples what is known already, and keeps the logits of what is to be judged."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.known: dict[Request, tuple[int, Sample]] = {}
        self.predictions: Predictions | None = None

    def _read_out(self, inputs: StepInputs, hidden: Tensor, outputs: Sequence[SequenceOutput]) -> None:
        judged: list[tuple[int, int, int, int]] = []  # row, sample, position, target
        for sequence, first_row, output in zip(inputs.sequences, inputs.first_rows, outputs, strict=True):
            number, sample = self.known[sequence.request]
            stop = sequence.start + sequence.num_tokens
            if sequence.samples:
                output.token_id = sample.ids[stop]
            for position in range(max(sequence.start + 1, sample.score_from), min(stop + 1, len(sample.ids))):
                row = first_row + position - 1 - sequence.start
                judged.append((row, number, position, sample.ids[position]))
        self.predictions = None
        if judged:
            rows, samples, positions, targets = torch.tensor(judged, device=hidden.device).T
            logprobs = torch.log_softmax(self._model.logits(hidden.index_select(0, rows)), dim=-1)
            self.predictions = Predictions(samples, positions, targets, logprobs)


class ScoringEngine:
    """One setting at work on a list of samples. Two of them over the same samples plan the same steps."""

    def __init__(
        self,
        loaded: LoadedModel,
        samples: Sequence[Sample],
        values: Mapping[str, TunableValue],
        conditions: Conditions,
        clock: Clock,
    ) -> None:
        """Raises EngineError for a sample that is longer than the model allows."""
        longest = max(len(sample.ids) for sample in samples)
        if longest > loaded.config.max_model_len:
            raise EngineError(f"{longest} tokens are to be scored; the model takes {loaded.config.max_model_len}")
        self._clock = clock
        limits = {
            "max_num_seqs": _at_least("max_num_seqs", conditions.batch),
            "max_num_batched_tokens": _at_least("max_num_batched_tokens", conditions.batch * conditions.chunk_tokens),
        }
        self.engine = OfflineEngine(
            loaded,
            pool_bytes=_pool_bytes(loaded, longest, int(limits["max_num_seqs"])),
            values={**values, **limits},
            recent_tokens=conditions.recent_tokens,
            sinks=conditions.sinks,
            sync_recode=False,
            clock=clock,
            max_chunk_tokens=conditions.chunk_tokens,
            new_runner=_ForcingRunner,
        )
        runner = self.engine.runner
        if not isinstance(runner, _ForcingRunner):
            raise TypeError("the engine was built with another runner")
        self._runner = runner
        for number, sample in enumerate(samples):
            params = SamplingParams(max_tokens=len(sample.ids) - sample.prompt, ignore_eos=True)
            policy = CachePolicy(use_prefix_cache=False)
            request = self.engine.add(sample.ids[: sample.prompt], params, policy=policy).request
            runner.known[request] = (number, sample)
        self.decode_tokens = 0
        self.decode_ns = 0

    @property
    def is_done(self) -> bool:
        return not (self.engine.scheduler.running or self.engine.scheduler.waiting)

    def step(self) -> Predictions | None:
        """Run one step, then recode everything that is due."""
        begin_ns = self._clock.now_ns()
        plan = self.engine.step()
        self.engine.settle()
        if plan.sequences and all(sequence.is_decode for sequence in plan.sequences):
            self.decode_ns += self._clock.now_ns() - begin_ns
            self.decode_tokens += plan.num_tokens
        if plan.preempted:
            raise EngineError("the KV pool is too small to score in one go; use a smaller batch")
        return self._runner.predictions

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Of steps that only decoded, recoding included; None where there was none."""
        return self.decode_tokens / (self.decode_ns / 1e9) if self.decode_ns else None


def _at_least(knob: str, value: int) -> TunableValue:
    """The smallest value of a knob that is no smaller than ``value``, or its largest."""
    offered = [int(offer) for offer in TUNABLES[knob].values]
    return min((offer for offer in offered if offer >= value), default=max(offered))


def _pool_bytes(loaded: LoadedModel, longest: int, sequences: int) -> int:
    """Enough for that many sequences in the native format, so that nobody waits and nothing is preempted."""
    per_token = sum(token_bytes(group.shape) for group in loaded.groups)
    slabs = MIN_SLABS * sum(slab_bytes(group.shape, 1024) for group in loaded.groups)
    return slabs + int(sequences * (longest + _BLOCK_SLACK) * per_token * _POOL_MARGIN)
