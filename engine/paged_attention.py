"""Attention of one step over the arenas: where each layer's KV goes and which kernels read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.attention import StepInputs
from engine.attention_collector import AttentionCollector

if TYPE_CHECKING:
    from engine.model_runner import ModelRunner
    from kernels.plan import DecodePlan
    from kernels.table import TableView


class PagedAttention:
    """:class:`engine.models.decoder.Attention` of one step over a runner's arenas."""

    def __init__(self, runner: ModelRunner, inputs: StepInputs) -> None:
        self._inputs = inputs
        self._ops = runner.ops
        self._arenas = runner.arenas
        self._groups = runner.loaded.groups
        self._place = runner.place
        self.scale = float(runner.loaded.config.head_dim) ** -0.5
        self.collector = AttentionCollector.of(inputs, self._groups, self._ops, self.scale)
        self._streamer = runner.streamer
        for number, group in enumerate(inputs.groups):
            if group.streamed is not None and self._streamer is not None:
                self._streamer.begin(number, group.streamed, group.entries)
        # Once for all layers of a group: only offsets of streamed tiles differ between them, and a plan has none.
        self._plans = {
            number: self._plan(runner, number, given.decode)
            for number, given in enumerate(inputs.groups)
            if given.decode is not None
        }
        runner.plans = self._plans

    def _plan(self, runner: ModelRunner, number: int, table: TableView) -> DecodePlan:
        """The last step's, if its table is still the same object: positions then are those of now."""
        group, mass = self._groups[number], self.collector is not None and self.collector.observes_decode
        last = runner.plans.get(number)
        if last is not None and last.table is table and last.mass == mass:
            return last
        return self._ops.plan_decode(
            table,
            group.shape,
            heads=runner.loaded.config.num_heads,
            native_dtype=runner.loaded.model.dtype,
            window=group.window or 0,
            mass=mass,
        )

    @property
    def only_plan(self) -> DecodePlan | None:
        """The plan that is all of this step's attention: every sequence has one token, and every layer reads the same
        table from the arena, observed by nobody. None where that is not so.
        """
        given = self._inputs.groups[0]
        if len(self._inputs.groups) > 1 or given.prefill is not None or given.streamed is not None:
            return None
        return None if self.collector is not None else self._plans.get(0)

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
                scale=self.scale,
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
                scale=self.scale,
                window=window,
                out=out[split:],
            )
            if collector is not None:
                collector.add_prefill(number, arena, index, query[split:])
        return out
