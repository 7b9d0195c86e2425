"""Collects, while a step's layers run, what its observed queries attend: per layer group and chunk of 16 positions.

Eviction by attention needs one figure per chunk and group, so heads and layers are reduced on the device, and one small
copy per group reaches the host when the step's tokens do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.attention import StepInputs
from engine.attention_mass import ObservedMass
from engine.formats import CHUNK_TOKENS
from engine.memory_model import GroupSpec
from engine.request import Request
from kernels.table import TableView

if TYPE_CHECKING:
    from engine.model_runner import KernelOps


class AttentionCollector:
    """One step's observations. Ask ``decode_mass`` for the buffer that a decode kernel fills, ``add_decode`` it after
    the kernel, call ``add_prefill`` once per layer, and take ``results`` when all layers are done.
    """

    def __init__(self, inputs: StepInputs, groups: Sequence[GroupSpec], ops: KernelOps, scale: float) -> None:
        self._inputs = inputs
        self._groups = groups
        self._ops = ops
        self._scale = scale
        self._num_chunks = -(-inputs.end // CHUNK_TOKENS)
        self._decodes = [i for i, part in enumerate(inputs.sequences[: inputs.num_decode]) if part.observed]
        self._prefills = [i for i, part in enumerate(inputs.sequences) if i >= inputs.num_decode and part.observed]
        self._buffers: dict[tuple[int, int], Tensor] = {}
        self._found: dict[tuple[int, bool], Tensor] = {}
        self._views: dict[int, TableView] = {}
        if self._prefills:
            self._prepare_prefill()

    @classmethod
    def of(
        cls, inputs: StepInputs, groups: Sequence[GroupSpec], ops: KernelOps, scale: float
    ) -> AttentionCollector | None:
        """A collector, or None when nothing is observed in this step."""
        return cls(inputs, groups, ops, scale) if any(part.observed for part in inputs.sequences) else None

    def _prepare_prefill(self) -> None:
        """Rows (among the step's chunks) of the observed queries, all of one sequence in order."""
        inputs, device = self._inputs, self._inputs.positions.device
        rows: list[int] = []
        starts, first = [0], []
        for i in self._prefills:
            part = inputs.sequences[i]
            stop = inputs.first_rows[i] - inputs.num_decode + part.num_tokens
            rows += range(stop - part.observed, stop)
            starts.append(len(rows))
            first.append(part.start + part.num_tokens - part.observed)
        self._chosen = torch.tensor([i - inputs.num_decode for i in self._prefills], device=device)
        self._rows = torch.tensor(rows, device=device)
        self._starts = torch.tensor(starts, dtype=torch.int32, device=device)
        self._last = max(inputs.sequences[i].observed for i in self._prefills)
        query_first = torch.tensor(first, dtype=torch.int32, device=device)
        for number, group in enumerate(inputs.groups):
            if group.prefill is not None:
                entries, counts = group.prefill.entries[self._chosen], group.prefill.num_entries[self._chosen]
                self._views[number] = TableView(entries, counts, query_first, max(first))

    @property
    def observes_decode(self) -> bool:
        return bool(self._decodes)

    def decode_mass(self, number: int) -> Tensor | None:
        """A buffer float32 [sequences, kv_heads, chunks] for the decode kernel of a group's layer, None if unwanted."""
        if not self._decodes:
            return None
        return self._buffer(number, self._inputs.num_decode)

    def add_decode(self, number: int, mass: Tensor | None) -> None:
        """Take what the kernel put there."""
        if mass is not None:
            self._reduce((number, False), mass)

    def add_prefill(self, number: int, arena: Tensor, layer: int, query: Tensor) -> None:
        """Observe the chunks' queries [tokens, heads, head_dim] of a group's layer (index inside the group)."""
        if number not in self._views:
            return
        group, view, inputs = self._groups[number], self._views[number], self._inputs.groups[number]
        if inputs.streamed is not None and inputs.prefill is not None:
            view.entries.copy_(inputs.prefill.entries[self._chosen])  # where this layer's streamed tiles are
        mass = self._buffer(number, len(self._prefills))
        self._ops.attention_mass(
            query[self._rows],
            arena,
            group.shape,
            layer,
            view,
            self._starts,
            scale=self._scale,
            window=group.window or 0,
            last=self._last,
            mass=mass,
        )
        self._reduce((number, True), mass)

    def results(self) -> dict[Request, ObservedMass]:
        """What each observed request attended."""
        host = {key: value.cpu().numpy() for key, value in self._found.items()}
        found: dict[Request, ObservedMass] = {}
        for is_prefill, indices in ((False, self._decodes), (True, self._prefills)):
            for place, index in enumerate(indices):
                part = self._inputs.sequences[index]
                row = place if is_prefill else index
                chunks = -(-(part.start + part.num_tokens) // CHUNK_TOKENS)
                groups = tuple(host[number, is_prefill][row, :chunks] for number in range(len(self._groups)))
                found[part.request] = ObservedMass(part.observed, groups)
        return found

    def _buffer(self, number: int, sequences: int) -> Tensor:
        key = (number, sequences)
        buffer = self._buffers.get(key)
        if buffer is None:
            shape = (sequences, self._groups[number].shape.num_kv_heads, self._num_chunks)
            buffer = self._buffers[key] = torch.empty(shape, device=self._inputs.positions.device)
        return buffer

    def _reduce(self, key: tuple[int, bool], mass: Tensor) -> None:
        """The largest over heads and layers: retrieval sits in a few of them, and sinks would dominate a mean."""
        heads = mass.amax(1)
        self._found[key] = torch.maximum(self._found[key], heads) if key in self._found else heads
