"""What is asked of planning, and what a plan says. No torch.

All bytes are the memory model's (:mod:`engine.memory_model`), as the engine allocates them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autotune.planning.losses import Losses
from autotune.planning.machine import Machine, Memory
from engine.formats import NATIVE
from engine.memory_model import GroupSpec, PoolLayout
from engine.models.parameters import Parameters
from engine.stream_layout import stream_buffers


@dataclass(frozen=True)
class Question:
    """What is asked. ``contexts``: tokens per session, empty for the usual ones; ``sessions``: None if any number will
    do; the other fields are options of ``autotune engine``.
    """

    contexts: tuple[int, ...] = ()
    sessions: int | None = None
    kv_format: str = NATIVE.name
    block_size: int = 16
    dtype: str = "auto"
    kv_pool_bytes: int | None = None
    host_pool_bytes: int = 0
    protect_layers: int = 0
    recent_tokens: int = 64
    sinks: int = 16
    watermark: float = 0.01


@dataclass(frozen=True)
class Row:
    """One setting at one context. ``sessions``: that fit at once, None without a pool; ``saved``: share of native's
    bytes; ``loss``: relative, None where not measured; ``step_s``: of a step that decodes ``step_sessions`` of them.
    """

    kv_format: str
    block_size: int
    eviction: str
    keep_tokens: int | None
    context: int
    session_bytes: int
    sessions: int | None
    host_sessions: int | None
    saved: float
    loss: float | None
    step_sessions: int | None = None
    step_s: float | None = None


@dataclass(frozen=True)
class Plan:
    """Everything that was worked out. ``token_bytes``: by format, all layers, scales included. ``problem``: why there
    is no pool, empty if there is one.
    """

    model: str
    architecture: str
    dtype: str
    max_model_len: int
    parameters: Parameters
    question: Question
    machine: Machine
    memory: Memory
    groups: Sequence[GroupSpec]
    layout: PoolLayout | None
    host: PoolLayout | None
    problem: str
    token_bytes: dict[str, float]
    losses: Losses
    formats: list[Row] = field(default_factory=list)
    block_sizes: list[Row] = field(default_factory=list)
    evictions: list[Row] = field(default_factory=list)
    step_source: str = ""

    def row(self, context: int, kv_format: str) -> Row:
        """The row of a format at a context, at the block size that was asked for."""
        return next(row for row in self.formats if (row.context, row.kv_format) == (context, kv_format))

    @property
    def arena_bytes(self) -> list[int]:
        """What the engine allocates per layer group: the slabs, and the buffers for streaming behind them."""
        if self.layout is None:
            return []
        buffers = stream_buffers(self.layout.slab_bytes, self.memory.staging)
        return [self.layout.arena_bytes(group) + 2 * size for group, size in enumerate(buffers)]

    @property
    def host_arena_bytes(self) -> list[int]:
        """The same in host memory; empty without a host tier."""
        return [] if self.host is None else [self.host.arena_bytes(group) for group in range(len(self.groups))]

    @property
    def main_context(self) -> int:
        """The longest context that was asked for."""
        return max(self.question.contexts)
