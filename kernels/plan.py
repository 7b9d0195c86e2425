"""What the layers of one group share in one decode step, so that it is worked out once and not once per layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.backend import KernelBackend
from kernels.layout import KVShape
from kernels.table import TableView


@dataclass(frozen=True, eq=False)
class DecodePlan:
    """Made by :func:`kernels.ops.plan_decode`, handed to every :func:`kernels.ops.decode_attention` of the step.

    It holds for one table object as long as its counts and positions stay as they are; offsets and formats of entries
    may change between layers, as those of streamed tiles do. Calls that share a plan may share scratch memory, so on a
    GPU all belong on one stream.

    Attributes:
        table: the very object that was planned.
        shape: the group's.
        heads: query heads.
        dtype: of the queries.
        window: see :func:`kernels.ops.decode_attention`.
        mass: whether there is scratch for the share of attention.
        backend: who made ``prepared``.
        prepared: the backend's own; None where it has nothing to prepare.
    """

    table: TableView
    shape: KVShape
    heads: int
    dtype: torch.dtype
    window: int
    mass: bool
    backend: KernelBackend
    prepared: object

    def check(
        self, backend: KernelBackend, query: torch.Tensor, shape: KVShape, table: TableView, window: int, *, mass: bool
    ) -> None:
        """Raise ValueError unless the plan is for this call."""
        if self.backend is not backend:
            raise ValueError("the plan was made by another backend")
        if self.table is not table:
            raise ValueError("the plan was made for another table")
        if table.entries.device != query.device:
            raise ValueError(f"the plan's table is on {table.entries.device}, query on {query.device}")
        made, asked = (self.shape, self.heads, self.dtype, self.window), (shape, query.shape[1], query.dtype, window)
        for name, mine, theirs in zip(("shape", "heads", "dtype", "window"), made, asked, strict=True):
            if mine != theirs:
                raise ValueError(f"the plan was made for {name} {mine}, not {theirs}")
        if mass and not self.mass:
            raise ValueError("the plan was made without the share of attention")
