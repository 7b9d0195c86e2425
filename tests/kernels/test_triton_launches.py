"""What Triton would be asked to compile and launch, counted without a GPU: nothing of it runs.

A recompilation takes seconds in the middle of a running service, so the number of compiled kernels must not grow with
what happens to be served; and a CUDA graph records a grid, so the grid must not depend on what tables hold.
"""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (Linux only)")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("triton is interpreting in this process", allow_module_level=True)

from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import jit

from kernels import ops
from kernels.layout import FORMATS, JOB_WIDTH, NATIVE, KVShape
from kernels.table import TableView
from kernels.triton.attention_mass import attention_mass
from kernels.triton.copy_bytes import copy_bytes
from kernels.triton.decode_attention import decode_attention, decode_attention_launcher
from kernels.triton.decode_plan import DecodeScratch, launch_plan, most_pieces
from kernels.triton.gather import gather_kv
from kernels.triton.prefill_attention import prefill_attention
from kernels.triton.recode import recode
from kernels.triton.write_kv import write_kv

SHAPE, GROUP, DTYPE = KVShape(4, 2, 64, 2), 4, torch.bfloat16
ARENA = torch.zeros(1 << 16, dtype=torch.uint8)


class Launches:
    """Keys of the compiled kernels that launches so far need, and their grids, by kernel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keys: dict[str, set[str]] = defaultdict(set)
        self.grids: dict[str, list[tuple[int, ...]]] = defaultdict(list)
        backend = make_backend(GPUTarget("cuda", 90, 32))
        binders: dict[str, Callable[..., Any]] = {}

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            assert not warmup
            name = kernel.__name__
            if name not in binders:
                binders[name] = jit.create_function_from_signature(kernel.signature, kernel.params, backend)
            _, specialisation, rest = binders[name](*args, **options)
            self.keys[name].add(str(specialisation) + str(rest))
            self.grids[name].append(tuple(grid))

        monkeypatch.setattr(jit.JITFunction, "run", run)

    @property
    def compiled(self) -> int:
        return sum(map(len, self.keys.values()))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return Launches(monkeypatch)


def table_of(sequences: int, tokens: int, formats: tuple[int, ...] = (0,)) -> TableView:
    entries = torch.zeros((sequences, -(-tokens // 32), 4), dtype=torch.int32)
    entries[..., 1] = torch.tensor(formats)[torch.arange(entries.shape[1]) % len(formats)]
    entries[..., 2], entries[..., 3] = torch.arange(0, tokens, 32), 32
    counts = torch.full((sequences,), entries.shape[1], dtype=torch.int32)
    return TableView(entries, counts, torch.full((sequences,), tokens - 1, dtype=torch.int32))


def serve(sequences: int, tokens: int, layer: int, window: int) -> None:
    """One call of everything for a batch. Sizes are chosen by the test, alignment is as torch's allocator gives it."""
    table, heads = table_of(sequences, tokens, tuple(range(len(FORMATS)))), SHAPE.num_kv_heads * GROUP
    query = torch.zeros((sequences, heads, SHAPE.head_dim), dtype=DTYPE)
    out = torch.empty_like(query)
    mass = torch.empty((sequences, SHAPE.num_kv_heads, tokens // 16 + 1))
    for share in (None, mass):
        decode_attention(query, ARENA, SHAPE, layer, table, scale=0.1, window=window, out=out, mass=share)
    starts = torch.arange(sequences + 1, dtype=torch.int32)
    prefill_attention(query, ARENA, SHAPE, layer, table, starts, scale=0.1, window=window, out=out)
    attention_mass(query, ARENA, SHAPE, layer, table, starts, scale=0.1, window=window, last=sequences + 1, mass=mass)
    fused = torch.zeros((sequences, 3 * SHAPE.num_kv_heads, SHAPE.head_dim), dtype=DTYPE)
    key, value = fused[:, :2], fused[:, 2:4]
    write_kv(ARENA, SHAPE, layer, key, value, torch.zeros((sequences, 2), dtype=torch.int32))
    recode(ARENA, SHAPE, torch.zeros((tokens, JOB_WIDTH), dtype=torch.int32), native_dtype=DTYPE)
    gather_kv(ARENA, SHAPE, layer, table.entries[0], table.entries.shape[1], native_dtype=DTYPE)
    copy_bytes(ARENA, ARENA, torch.zeros((tokens, 3), dtype=torch.int64))


def test_one_model_compiles_each_kernel_once_whatever_is_served(launches: Launches) -> None:
    serve(3, 70, 0, 0)
    first = launches.compiled
    # With and without the share of attention there are two forms of two decode kernels.
    assert first == len(launches.keys) + 2
    for sequences, tokens, layer, window in itertools.product(
        (1, 2, 7, 16, 33), (1, 17, 256, 1500), (1, 2), (0, 1, 48)
    ):
        serve(sequences, tokens, layer, window)
    assert launches.compiled == first, {name: len(keys) for name, keys in launches.keys.items()}
    assert len(launches.grids["_decode_split_kernel"]) == 2 * (1 + 5 * 4 * 2 * 3)


def test_the_count_sees_a_recompilation(launches: Launches) -> None:
    table = table_of(1, 32)
    for start in (0, 1):
        # A query that does not start at a multiple of 16 bytes needs another kernel.
        query = torch.zeros(8 * 64 + 1, dtype=DTYPE)[start : start + 8 * 64].view(1, 8, 64)
        decode_attention(query, ARENA, SHAPE, 0, table, scale=0.1, out=torch.empty((1, 8, 64), dtype=DTYPE))
    assert len(launches.keys["_decode_split_kernel"]) == 2


def test_a_recorded_decode_serves_every_batch_of_its_size(launches: Launches) -> None:
    sequences, heads = 4, SHAPE.num_kv_heads * GROUP
    query = torch.zeros((sequences, heads, SHAPE.head_dim), dtype=DTYPE)
    out, mass = torch.empty_like(query), torch.empty((sequences, SHAPE.num_kv_heads, 64))
    scratch = DecodeScratch.allocate(
        (sequences, heads, SHAPE.head_dim), SHAPE.num_kv_heads, most_pieces(sequences, 1024), query.device, mass=True
    )
    seen = set()
    for tokens, formats in itertools.product((1, 300, 1024), ((0,), (NATIVE.code, 3), (1, 2, 3))):
        table = table_of(sequences, 1024, formats)
        table.query_first.fill_(tokens - 1)
        table.num_entries[2:] = 0
        launch_plan(table.num_entries, table.query_first, scratch, window=0)
        decode_attention_launcher(
            query, ARENA, SHAPE, 0, table,
            scale=0.1, window=0, out=out, scratch=scratch, programs=64, mass=mass,
        )  # fmt: skip
        seen.add(tuple((name, grids[-1]) for name, grids in sorted(launches.grids.items())))
    assert len(seen) == 1
    assert launches.compiled == 4


def test_a_step_plans_once_for_all_layers(launches: Launches) -> None:
    table, heads = table_of(3, 600), SHAPE.num_kv_heads * GROUP
    query = torch.zeros((3, heads, SHAPE.head_dim), dtype=DTYPE)
    out, mass = torch.empty_like(query), torch.empty((3, SHAPE.num_kv_heads, 40))
    plan = ops.plan_decode(table, SHAPE, heads=heads, native_dtype=DTYPE, mass=True, backend="triton")
    for layer in range(SHAPE.num_layers):
        share = mass if layer % 2 else None
        ops.decode_attention(
            query, ARENA, SHAPE, layer, table, scale=0.1, out=out, mass=share, plan=plan, backend="triton"
        )
    counts = {name: len(grids) for name, grids in launches.grids.items()}
    assert counts["_decode_plan_kernel"] == 1
    assert counts["_decode_split_kernel"] == counts["_decode_merge_kernel"] == SHAPE.num_layers
    ops.decode_attention(query, ARENA, SHAPE, 0, table, scale=0.1, out=out, backend="triton")
    assert len(launches.grids["_decode_plan_kernel"]) == 2
