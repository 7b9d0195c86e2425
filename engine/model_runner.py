"""Carries out step plans with a real model: owns weights' inputs and the KV arenas, knows nothing of scheduling."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import Protocol, cast

import torch
from torch import Tensor

import kernels.ops
from engine.attention import BatchBuilder, StepInputs
from engine.loader import LoadedModel
from engine.models.fused_decoder import FusedDecoder
from engine.paged_attention import PagedAttention
from engine.plan import RecodeBatch, SequenceOutput, StepPlan
from engine.sampling import Sampler, token_logprobs
from engine.streaming import Streamer, StreamPlanner
from engine.table_rows import BlockTables
from kernels.layout import KVShape
from kernels.memory import zeroed
from kernels.plan import DecodePlan
from kernels.table import TableView


class KernelOps(Protocol):
    """The operations of :mod:`kernels.ops` that a runner needs."""

    def write_kv(
        self, arena: Tensor, shape: KVShape, layer: int, key: Tensor, value: Tensor, slots: Tensor
    ) -> None: ...

    def plan_decode(
        self,
        table: TableView,
        shape: KVShape,
        *,
        heads: int,
        native_dtype: torch.dtype,
        window: int = 0,
        mass: bool = False,
    ) -> DecodePlan: ...

    def decode_attention(
        self,
        query: Tensor,
        arena: Tensor,
        shape: KVShape,
        layer: int,
        table: TableView,
        *,
        scale: float,
        window: int = 0,
        out: Tensor,
        mass: Tensor | None = None,
        plan: DecodePlan | None = None,
    ) -> object: ...

    def attention_mass(
        self,
        query: Tensor,
        arena: Tensor,
        shape: KVShape,
        layer: int,
        table: TableView,
        query_starts: Tensor,
        *,
        scale: float,
        window: int = 0,
        last: int,
        mass: Tensor,
    ) -> object: ...

    def prefill_attention(
        self,
        query: Tensor,
        arena: Tensor,
        shape: KVShape,
        layer: int,
        table: TableView,
        query_starts: Tensor,
        *,
        scale: float,
        window: int = 0,
        out: Tensor,
    ) -> object: ...

    def recode(
        self, arena: Tensor, shape: KVShape, jobs: Tensor, *, native_dtype: torch.dtype | None = None
    ) -> None: ...


@dataclass(frozen=True)
class StepWork:
    """KV bytes that the last step's attention covered (each sequence's counted once) and that it wrote; those of the
    former that were streamed from the host, and how long computing waited for them.
    """

    kv_bytes_read: int = 0
    kv_bytes_written: int = 0
    host_bytes_read: int = 0
    host_wait_ns: int = 0


class ModelRunner:
    """Runs the model over paged KV. One thread calls it; ``execute`` returns when its tokens are known.

    ``arenas``: one uint8 tensor per layer group, on the model's device. ``ops``: the kernels. ``place``: of each layer,
    its group and its number there. ``streamer``: of blocks on the host, if there are any. ``plans``: the last step's,
    by group.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        arena_bytes: Sequence[int],
        ops: KernelOps,
        *,
        rng: random.Random | None = None,
        whole_steps: bool | None = None,
    ) -> None:
        """``arena_bytes``: size of each group's arena. ``rng``: seeds of sampled requests that name none.
        ``whole_steps``: run steps that only decode in one call where the model can, which goes past ``ops`` (None: if
        they are :mod:`kernels.ops` itself).

        Raises torch.OutOfMemoryError (CUDA) or RuntimeError (CPU) when the arenas do not fit.
        """
        self.loaded = loaded
        self.last_work = StepWork()
        model = loaded.model
        self._model = model
        self.ops = ops
        self._whole_steps = ops is kernels.ops if whole_steps is None else whole_steps
        self.arenas = [zeroed(size, model.device) for size in arena_bytes]
        self._builder = BatchBuilder(
            [group.shape for group in loaded.groups], [group.window for group in loaded.groups], model.device
        )
        self.streamer: Streamer | None = None
        self.plans: dict[int, DecodePlan] = {}
        self._sampler = Sampler(rng or random.Random())
        self.place = {
            layer: (number, index)
            for number, group in enumerate(loaded.groups)
            for index, layer in enumerate(group.layers)
        }

    def stream_with(self, streamer: Streamer, buffers: Sequence[tuple[int, int]]) -> None:
        """Attend blocks on the host through buffers in each arena: (first byte, size of each of the two) per group."""
        self.streamer = streamer
        self._builder.stream_through(
            [StreamPlanner(group.shape, *place) for group, place in zip(self.loaded.groups, buffers, strict=True)]
        )

    def recode(self, batches: Sequence[RecodeBatch]) -> None:
        """Convert tiles, all layers of their group. Call it before the step's ``execute``, which does not."""
        for batch in batches:
            if batch.jobs:
                jobs = torch.tensor(batch.jobs, dtype=torch.int32, device=self._model.device)
                shape = self.loaded.groups[batch.group].shape
                self.ops.recode(self.arenas[batch.group], shape, jobs, native_dtype=self._model.dtype)

    @torch.inference_mode()
    def execute(self, plan: StepPlan, tables: BlockTables) -> list[SequenceOutput]:
        """Compute the planned tokens and sample where asked. Outputs are in the order of ``plan.sequences``.

        The plan's recodes must have been done, and the blocks of its tokens allocated.
        """
        if not plan.sequences:
            self.last_work = StepWork()
            return []
        inputs = self._builder.build(plan.sequences, tables)
        attention = PagedAttention(self, inputs)
        hidden = self._hidden(inputs, attention)
        waited = self.streamer.take_wait_ns() if self.streamer is not None else 0
        self.last_work = StepWork(inputs.kv_bytes_read, inputs.kv_bytes_written, inputs.host_bytes_read, waited)
        outputs = [SequenceOutput(sequence.request) for sequence in inputs.sequences]
        self._read_out(inputs, hidden, outputs)
        if attention.collector is not None:
            observed = attention.collector.results()
            for output in outputs:
                output.mass = observed.get(output.request)
        if all(map(is_, inputs.sequences, plan.sequences)):
            return outputs
        by_sequence = dict(zip(map(id, inputs.sequences), outputs, strict=True))
        return [by_sequence[id(sequence)] for sequence in plan.sequences]

    def _hidden(self, inputs: StepInputs, attention: PagedAttention) -> Tensor:
        """Hidden states [tokens, hidden] of the step."""
        model, plan = self._model, attention.only_plan
        if self._whole_steps and plan and isinstance(model, FusedDecoder) and model.can_decode(plan.prepared):
            group = self.loaded.groups[0]
            return model.decode(
                inputs.ids,
                inputs.positions,
                inputs.end,
                self.arenas[0],
                group.shape,
                plan.prepared,
                inputs.groups[0].slots,
                scale=attention.scale,
                window=group.window or 0,
            )
        return model.hidden(inputs.ids, inputs.positions, inputs.end, attention)

    def _read_out(self, inputs: StepInputs, hidden: Tensor, outputs: Sequence[SequenceOutput]) -> None:
        """From hidden states [tokens, hidden] to what each sequence of the batch reports."""
        self._sample(inputs, hidden, outputs)
        self._score_prompts(inputs, hidden, outputs)

    def _sample(self, inputs: StepInputs, hidden: Tensor, outputs: Sequence[SequenceOutput]) -> None:
        sequences, rows = inputs.sequences, cast("Sequence[int]", range(len(hidden)))
        if len(rows) != len(sequences) or not all(sequence.samples for sequence in sequences):
            batch = zip(sequences, inputs.first_rows, outputs, strict=True)
            sampling = [(row + part.num_tokens - 1, output) for part, row, output in batch if part.samples]
            if not sampling:
                return
            rows, outputs = zip(*sampling, strict=True)
        logits = self._logits(hidden, rows)
        requests = [output.request for output in outputs]
        tokens = self._sampler.sample(logits, requests)
        for output, token in zip(outputs, tokens, strict=True):
            output.token_id = token
        wanted = [row for row, request in enumerate(requests) if request.params.logprobs is not None]
        if wanted:
            num_top = [requests[row].params.logprobs or 0 for row in wanted]
            chosen = logits if len(wanted) == len(requests) else logits[torch.tensor(wanted, device=logits.device)]
            scored = token_logprobs(chosen, [tokens[row] for row in wanted], num_top)
            for row, logprobs in zip(wanted, scored, strict=True):
                outputs[row].logprobs = logprobs

    def _score_prompts(self, inputs: StepInputs, hidden: Tensor, outputs: Sequence[SequenceOutput]) -> None:
        """Log-probabilities of prompt tokens whose predecessor was computed (again, after a preemption)."""
        for index, output in enumerate(outputs):
            request = output.request
            if request.params.prompt_logprobs is None:
                continue
            sequence, row = inputs.sequences[index], inputs.first_rows[index]
            targets = request.prompt_ids[sequence.start + 1 : sequence.start + sequence.num_tokens + 1]
            if targets:
                logits = self._logits(hidden, range(row, row + len(targets)))
                num_top = [request.params.prompt_logprobs] * len(targets)
                output.prompt_logprobs = token_logprobs(logits, targets, num_top)

    def _logits(self, hidden: Tensor, rows: Sequence[int]) -> Tensor:
        if len(rows) != len(hidden):
            hidden = hidden.index_select(0, torch.tensor(rows, device=hidden.device))
        return self._model.logits(hidden)
