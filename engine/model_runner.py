"""Carries out step plans with a real model: owns weights' inputs and the KV arenas, knows nothing of scheduling."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.attention import BatchBuilder, BlockTables, StepInputs
from engine.attention_collector import AttentionCollector
from engine.loader import LoadedModel
from engine.plan import RecodeBatch, SequenceOutput, StepPlan
from engine.sampling import Sampler, token_logprobs
from engine.streaming import Streamer, StreamPlanner
from kernels.layout import KVShape
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

    ``arenas``: one uint8 tensor per layer group, on the model's device.
    """

    def __init__(
        self, loaded: LoadedModel, arena_bytes: Sequence[int], ops: KernelOps, *, rng: random.Random | None = None
    ) -> None:
        """``arena_bytes``: size of each group's arena. ``rng``: seeds of sampled requests that name none.

        Raises torch.OutOfMemoryError (CUDA) or RuntimeError (CPU) when the arenas do not fit.
        """
        self.loaded = loaded
        self.last_work = StepWork()
        model = loaded.model
        self._model = model
        self._ops = ops
        self.arenas = [torch.zeros(size, dtype=torch.uint8, device=model.device) for size in arena_bytes]
        self._builder = BatchBuilder(
            [group.shape for group in loaded.groups], [group.window for group in loaded.groups], model.device
        )
        self._streamer: Streamer | None = None
        self._sampler = Sampler(rng or random.Random())
        self._place = {
            layer: (number, index)
            for number, group in enumerate(loaded.groups)
            for index, layer in enumerate(group.layers)
        }

    def stream_with(self, streamer: Streamer, buffers: Sequence[tuple[int, int]]) -> None:
        """Attend blocks on the host through buffers in each arena: (first byte, size of each of the two) per group."""
        self._streamer = streamer
        self._builder.stream_through(
            [StreamPlanner(group.shape, *place) for group, place in zip(self.loaded.groups, buffers, strict=True)]
        )

    def recode(self, batches: Sequence[RecodeBatch]) -> None:
        """Convert tiles, all layers of their group. Call it before the step's ``execute``, which does not."""
        for batch in batches:
            if batch.jobs:
                jobs = torch.tensor(batch.jobs, dtype=torch.int32, device=self._model.device)
                shape = self.loaded.groups[batch.group].shape
                self._ops.recode(self.arenas[batch.group], shape, jobs, native_dtype=self._model.dtype)

    @torch.inference_mode()
    def execute(self, plan: StepPlan, tables: BlockTables) -> list[SequenceOutput]:
        """Compute the planned tokens and sample where asked. Outputs are in the order of ``plan.sequences``.

        The plan's recodes must have been done, and the blocks of its tokens allocated.
        """
        if not plan.sequences:
            self.last_work = StepWork()
            return []
        inputs = self._builder.build(plan.sequences, tables)
        attention = _PagedAttention(self, inputs)
        hidden = self._model.hidden(inputs.ids, inputs.positions, inputs.end, attention)
        waited = self._streamer.take_wait_ns() if self._streamer is not None else 0
        self.last_work = StepWork(inputs.kv_bytes_read, inputs.kv_bytes_written, inputs.host_bytes_read, waited)
        outputs = {id(sequence): SequenceOutput(sequence.request) for sequence in inputs.sequences}
        self._read_out(inputs, hidden, outputs)
        observed = attention.collector.results() if attention.collector is not None else {}
        for output in outputs.values():
            output.mass = observed.get(output.request)
        return [outputs[id(sequence)] for sequence in plan.sequences]

    def _read_out(self, inputs: StepInputs, hidden: Tensor, outputs: dict[int, SequenceOutput]) -> None:
        """From hidden states [tokens, hidden] to what each sequence reports, by ``id`` of the sequence."""
        self._sample(inputs, hidden, outputs)
        self._score_prompts(inputs, hidden, outputs)

    def _sample(self, inputs: StepInputs, hidden: Tensor, outputs: dict[int, SequenceOutput]) -> None:
        sampling = [
            (sequence, row + sequence.num_tokens - 1)
            for sequence, row in zip(inputs.sequences, inputs.first_rows, strict=True)
            if sequence.samples
        ]
        if not sampling:
            return
        logits = self._logits(hidden, [row for _, row in sampling])
        requests = [sequence.request for sequence, _ in sampling]
        tokens = self._sampler.sample(logits, requests)
        for (sequence, _), token in zip(sampling, tokens, strict=True):
            outputs[id(sequence)].token_id = token
        wanted = [row for row, request in enumerate(requests) if request.params.logprobs is not None]
        if wanted:
            num_top = [requests[row].params.logprobs or 0 for row in wanted]
            chosen = logits if len(wanted) == len(requests) else logits[torch.tensor(wanted, device=logits.device)]
            scored = token_logprobs(chosen, [tokens[row] for row in wanted], num_top)
            for row, logprobs in zip(wanted, scored, strict=True):
                outputs[id(sampling[row][0])].logprobs = logprobs

    def _score_prompts(self, inputs: StepInputs, hidden: Tensor, outputs: dict[int, SequenceOutput]) -> None:
        """Log-probabilities of prompt tokens whose predecessor was computed (again, after a preemption)."""
        for sequence, row in zip(inputs.sequences, inputs.first_rows, strict=True):
            request = sequence.request
            if request.params.prompt_logprobs is None:
                continue
            targets = request.prompt_ids[sequence.start + 1 : sequence.start + sequence.num_tokens + 1]
            if targets:
                logits = self._logits(hidden, range(row, row + len(targets)))
                num_top = [request.params.prompt_logprobs] * len(targets)
                outputs[id(sequence)].prompt_logprobs = token_logprobs(logits, targets, num_top)

    def _logits(self, hidden: Tensor, rows: Sequence[int]) -> Tensor:
        if len(rows) != len(hidden):
            hidden = hidden.index_select(0, torch.tensor(rows, device=hidden.device))
        return self._model.logits(hidden)


class _PagedAttention:
    """:class:`engine.models.decoder.Attention` of one step over the runner's arenas."""

    def __init__(self, runner: ModelRunner, inputs: StepInputs) -> None:
        self._inputs = inputs
        self._ops = runner._ops  # noqa: SLF001 -- one file, one idea
        self._arenas = runner.arenas
        self._groups = runner.loaded.groups
        self._place = runner._place  # noqa: SLF001
        self._scale = float(runner.loaded.config.head_dim) ** -0.5
        self.collector = AttentionCollector.of(inputs, self._groups, self._ops, self._scale)
        self._streamer = runner._streamer  # noqa: SLF001
        for number, group in enumerate(inputs.groups):
            if group.streamed is not None and self._streamer is not None:
                self._streamer.begin(number, group.streamed, group.entries)
        # Once for all layers of a group: only offsets of streamed tiles differ between them, and a plan has none.
        self._plans = {
            number: self._ops.plan_decode(
                given.decode,
                group.shape,
                heads=runner.loaded.config.num_heads,
                native_dtype=runner.loaded.model.dtype,
                window=group.window or 0,
                mass=self.collector is not None and self.collector.observes_decode,
            )
            for number, (given, group) in enumerate(zip(inputs.groups, self._groups, strict=True))
            if given.decode is not None
        }

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        number, index = self._place[layer]
        group, arena, inputs = self._groups[number], self._arenas[number], self._inputs.groups[number]
        shape, window, split = group.shape, group.window or 0, self._inputs.num_decode
        self._ops.write_kv(arena, shape, index, key, value, inputs.slots)
        if inputs.streamed is not None and self._streamer is not None:
            self._streamer.layer(number, index)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        collector = self.collector
        if inputs.decode is not None:
            mass = collector.decode_mass(number) if collector is not None else None
            self._ops.decode_attention(
                query[:split],
                arena,
                shape,
                index,
                inputs.decode,
                scale=self._scale,
                window=window,
                out=out[:split],
                mass=mass,
                plan=self._plans[number],
            )
            if collector is not None:
                collector.add_decode(number, mass)
        if inputs.prefill is not None:
            self._ops.prefill_attention(
                query[split:],
                arena,
                shape,
                index,
                inputs.prefill,
                self._inputs.query_starts,
                scale=self._scale,
                window=window,
                out=out[split:],
            )
            if collector is not None:
                collector.add_prefill(number, arena, index, query[split:])
        return out
