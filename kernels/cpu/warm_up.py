"""Compile the CPU kernels of one native dtype ahead of their first use."""

from __future__ import annotations

import numpy as np
import torch

from kernels.cpu.copy_bytes import copy_bytes
from kernels.cpu.decode_attention import PreparedRows, attend
from kernels.cpu.gather import gather_kv
from kernels.cpu.prefill_rows import attend_chunk, attend_chunk_parallel
from kernels.cpu.recode import recode
from kernels.cpu.tiles import elements_of, layout_array
from kernels.cpu.vector import LANES, WIDE
from kernels.cpu.write_kv import write_kv
from kernels.layout import ENTRY_WIDTH, JOB_WIDTH, KVShape
from kernels.table import TableView


def warm_up(native_dtype: torch.dtype) -> None:
    """Run every kernel once on nothing, which compiles it or loads it from the cache on disk.

    Raises ValueError when ``native_dtype`` is not float32, bfloat16 or float16.
    """
    if native_dtype not in {torch.float32, torch.bfloat16, torch.float16}:
        raise ValueError(f"native dtype must be float32, bfloat16 or float16, got {native_dtype}")
    shape = KVShape(num_layers=1, num_kv_heads=1, head_dim=8, element_bytes=native_dtype.itemsize)
    arena = torch.zeros(1 << 12, dtype=torch.uint8)
    tokens = torch.zeros((1, 1, shape.head_dim), dtype=native_dtype)
    one = torch.zeros(1, dtype=torch.int32)
    table = TableView(torch.zeros((1, 1, ENTRY_WIDTH), dtype=torch.int32), one, one)
    write_kv(arena, shape, 0, tokens, tokens, torch.zeros((1, 2), dtype=torch.int32))
    rows = PreparedRows.of(table, one.numpy(), one.numpy())
    for threads in {1, torch.get_num_threads()}:
        attend(tokens, arena, shape, 0, rows, 1.0, 0, torch.empty_like(tokens), threads=threads)
    if WIDE > LANES:
        _warm_up_chunks(arena, shape, native_dtype)
    recode(arena, shape, torch.zeros((0, JOB_WIDTH), dtype=torch.int32), native_dtype=native_dtype)
    copy_bytes(arena, arena, torch.zeros((0, 3), dtype=torch.int64))
    gather_kv(arena, shape, 0, table.entries[0], 0, native_dtype=native_dtype)


def _warm_up_chunks(arena: torch.Tensor, shape: KVShape, native_dtype: torch.dtype) -> None:
    """Attention of many new tokens, in both forms."""
    nothing = elements_of(torch.zeros((0, 1, shape.head_dim), dtype=native_dtype), native_dtype)
    where = (layout_array(shape), 0, shape.num_kv_heads)
    entries, spans = np.zeros((0, ENTRY_WIDTH), np.int32), np.zeros((0, 2), np.int64)
    stored = (arena.numpy(), elements_of(arena, native_dtype))
    attend_chunk(nothing, np.float32(1), stored, where, entries, 0, spans, 0, nothing)
    if torch.get_num_threads() > 1:
        attend_chunk_parallel(nothing, np.float32(1), stored, where, entries, 0, spans, 0, nothing)
