"""What it costs a KV cache to grow by one token per sequence: the engine's paged one, and one that concatenates.

Both store the same keys and values of the same sequences, all of equal length, so that the concatenating cache needs no
padding, and in one tensor per layer, as Hugging Face's ``DynamicCache`` has it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from statistics import median

import torch

from engine.attention import BatchBuilder
from engine.cache_manager import CacheManager
from engine.clock import Clock
from engine.events import NullSink
from engine.loader import LoadedModel
from engine.memory_model import GroupSpec, slab_bytes, token_bytes
from engine.plan import ScheduledSequence
from engine.request import Request, SamplingParams
from engine.tunables import default_values
from kernels import ops
from kernels.layout import ENTRY_WIDTH, NATIVE


@dataclass(frozen=True)
class Case:
    """``batch`` sequences of ``prompt`` tokens that grow by ``steps`` tokens each."""

    batch: int
    prompt: int
    steps: int


@dataclass(frozen=True)
class Growth:
    """Median nanoseconds, and bytes read and written besides the new token's own, both per token added."""

    token_ns: float
    moved_bytes: float


def reduction_pct(ours: float, theirs: float) -> float:
    """By how much smaller ours is; 100 when nothing is left of it, negative when it is larger."""
    return 100 * (1 - max(0.0, ours) / theirs)


class Paged:
    """The engine's own path: find room, keep the tables that kernels read, store the token, commit it.

    Of building a step's inputs only what block tables and slots add is counted: token ids and positions every engine
    must bring.
    """

    def __init__(self, loaded: LoadedModel, case: Case, clock: Clock) -> None:
        groups = self._groups = loaded.groups
        tokens = case.prompt + case.steps
        self._case, self._clock = case, clock
        self._cache = CacheManager(
            groups,
            _pool_bytes(groups, case.batch, tokens),
            default_values(),
            recent_tokens=64,
            sinks=16,
            watermark=0.0,
            clock=clock,
            events=NullSink(),
        )
        device, dtype = loaded.model.device, loaded.model.dtype
        ops.warm_up(device, dtype)
        self._arenas = [
            torch.zeros(self._cache.group_arena_bytes(group), dtype=torch.uint8, device=device)
            for group in range(len(groups))
        ]
        self._builder = BatchBuilder([group.shape for group in groups], [group.window for group in groups], device)
        self._bare = BatchBuilder([], [], device)
        self._new = [
            torch.randn(case.batch, group.shape.num_kv_heads, group.shape.head_dim, device=device).to(dtype)
            for group in groups
        ]
        rng = random.Random(0)
        self._requests = [self._prefilled(f"grow-{i}", rng) for i in range(case.batch)]

    def _prefilled(self, name: str, rng: random.Random) -> Request:
        prompt = [rng.randrange(1 << 15) for _ in range(self._case.prompt)]
        request = Request(name, prompt, SamplingParams(max_tokens=self._case.steps), 0)
        if not self._cache.allocate(request, len(prompt)):
            raise ValueError(f"no room for {self._case}")
        self._cache.commit(request, len(prompt))
        request.num_computed_tokens = len(prompt)
        request.output_ids.append(0)
        return request

    def grow(self) -> Growth:
        """Run the case."""
        steps = [self._step() for _ in range(self._case.steps)]
        return Growth(median(ns for ns, _ in steps) / self._case.batch, median(b for _, b in steps) / self._case.batch)

    def _step(self) -> tuple[int, int]:
        now, cache = self._clock.now_ns, self._cache
        begin = now()
        for request in self._requests:
            cache.allocate(request, 1)
        room_ns = now() - begin
        plan = [ScheduledSequence(request, request.num_computed_tokens, 1, samples=True) for request in self._requests]
        begin = now()
        self._bare.build(plan, cache)
        bare_ns = now() - begin
        begin = now()
        inputs = self._builder.build(plan, cache)
        tables_ns = now() - begin - bare_ns
        begin = now()
        for arena, group, new, given in zip(self._arenas, self._groups, self._new, inputs.groups, strict=True):
            for layer in range(group.shape.num_layers):
                ops.write_kv(arena, group.shape, layer, new, new, given.slots)
        write_ns = now() - begin
        begin = now()
        for request in self._requests:
            cache.commit(request, request.num_computed_tokens + 1)
        room_ns += now() - begin
        for request in self._requests:
            request.num_computed_tokens += 1
            request.output_ids.append(0)
        # Rows of the tables are copied into the step's inputs, each int32 read and written.
        entries = sum(
            cache.num_entries(request, group) for request in self._requests for group in range(len(self._new))
        )
        moved = 2 * 4 * (entries * ENTRY_WIDTH + sum(given.slots.numel() for given in inputs.groups))
        return room_ns + max(0, tables_ns) + write_ns, moved


class Concatenating:
    """One tensor [batch, kv_heads, tokens, head_dim] per layer for keys and one for values, replaced at every token."""

    def __init__(self, loaded: LoadedModel, case: Case, clock: Clock) -> None:
        self._case, self._clock = case, clock
        self._token_bytes = sum(token_bytes(group.shape) for group in loaded.groups)
        shapes = [(group.shape.num_kv_heads, group.shape.head_dim) for group in loaded.groups for _ in group.layers]
        device, dtype = loaded.model.device, loaded.model.dtype
        self._old = [
            torch.randn(case.batch, heads, case.prompt, dim, device=device).to(dtype)
            for heads, dim in shapes
            for _ in range(2)
        ]
        self._new = [
            torch.randn(case.batch, heads, 1, dim, device=device).to(dtype) for heads, dim in shapes for _ in range(2)
        ]

    def grow(self) -> Growth:
        """Run the case."""
        times, moved = [], []
        for step in range(self._case.steps):
            begin = self._clock.now_ns()
            for index, new in enumerate(self._new):
                self._old[index] = torch.cat([self._old[index], new], dim=2)
            times.append(self._clock.now_ns() - begin)
            moved.append(2 * self._token_bytes * (self._case.prompt + step))
        return Growth(median(times) / self._case.batch, median(moved))

    def floor_ns(self) -> float:
        """Median nanoseconds per token of writing the new token where a place for it is known already."""
        times = []
        for step in range(self._case.steps):
            at = step % self._case.prompt
            begin = self._clock.now_ns()
            for old, new in zip(self._old, self._new, strict=True):
                old[:, :, at : at + 1] = new
            times.append(self._clock.now_ns() - begin)
        return median(times) / self._case.batch


def _pool_bytes(groups: list[GroupSpec], batch: int, tokens: int) -> int:
    """Room for all of it in blocks of 16, and some slabs."""
    blocks = batch * (-(-tokens // 16) + 1)
    return sum(blocks * group.shape.tile_stride(NATIVE) + 4 * slab_bytes(group.shape, 1024) for group in groups)
