"""Prefill on the CPU: gather a sequence's KV into float32, then products of panels, or torch's fused attention.

A few new tokens over a long context cost like decode, and take that path: gathering would touch every byte twice.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from numba import set_num_threads
from torch.nn import functional

from kernels.cpu.decode_attention import THREADS_IN_USE, PreparedRows, attend, worthwhile_threads
from kernels.cpu.gather import gather_heads, stored_positions
from kernels.cpu.prefill_rows import attend_chunk, attend_chunk_parallel
from kernels.cpu.products import HERE
from kernels.cpu.tiles import elements_of, layout_array
from kernels.layout import ENTRY_FIRST, ENTRY_VALID, KVShape
from kernels.table import TableView

Int32 = npt.NDArray[np.int32]

# Measured: up to this many new tokens the decode kernel is as fast as gathering and torch's.
_FEW_QUERIES = 8
_GATHER_BYTES = 64 << 20
_QUERY_CHUNK = 256  # bounds the mask, and wastes less than larger ones on pairs that causality hides


def prefill_attention(
    query: torch.Tensor,
    arena: torch.Tensor,
    shape: KVShape,
    layer: int,
    table: TableView,
    query_starts: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    out: torch.Tensor,
) -> None:
    """See :func:`kernels.ops.prefill_attention`."""
    starts = query_starts.tolist()
    firsts = table.query_first.tolist()
    few: list[tuple[int, int, int]] = []
    source = _Source(arena, shape, layer, query.dtype)
    for sequence, (start, stop) in enumerate(itertools.pairwise(starts)):
        if stop - start <= _FEW_QUERIES:
            few.extend((row, sequence, firsts[sequence] + row - start) for row in range(start, stop))
            continue
        entries = table.entries[sequence, : int(table.num_entries[sequence])]
        source.attend(query[start:stop], entries, firsts[sequence], scale, window, out[start:stop])
    if few:
        rows, sequences, positions = torch.tensor(few, dtype=torch.int32).T.contiguous()
        some = out.new_empty((len(few), *out.shape[1:]))
        prepared = PreparedRows.of(table, sequences.numpy(), positions.numpy())
        attend(query[rows], arena, shape, layer, prepared, scale, window, some)
        out[rows] = some


@dataclass(frozen=True)
class _Source:
    arena: torch.Tensor
    shape: KVShape
    layer: int
    native_dtype: torch.dtype

    def attend(
        self, query: torch.Tensor, entries: torch.Tensor, first: int, scale: float, window: int, out: torch.Tensor
    ) -> None:
        """Attention of one sequence's queries [n, heads, head_dim], the first at position ``first``."""
        low = max(0, first - window + 1) if window > 0 else 0
        if HERE is not None:
            self._attend_panels(query, entries.numpy(), first, low, scale, window, out)
            return
        key_positions = stored_positions(entries, low)
        kv_heads, head_dim, tokens = self.shape.num_kv_heads, self.shape.head_dim, len(key_positions)
        if tokens == 0:
            out.zero_()
            return
        group = query.shape[1] // kv_heads
        at_once = max(1, min(kv_heads, _GATHER_BYTES // (8 * tokens * head_dim)))
        for head in range(0, kv_heads, at_once):
            heads = range(head, min(head + at_once, kv_heads))
            key, value = gather_heads(
                self.arena, self.shape, self.native_dtype, self.layer, heads, entries, low, tokens
            )
            part = slice(heads.start * group, heads.stop * group)
            _attend_dense(query[:, part], key, value, first, key_positions, scale, window, out[:, part])

    def _attend_panels(
        self, query: torch.Tensor, entries: Int32, first: int, low: int, scale: float, window: int, out: torch.Tensor
    ) -> None:
        """The same by panels, where products of panels are to be had."""
        spans, tokens = visible_spans(entries, first, query.shape[0], low, window)
        arguments = (
            elements_of(query.contiguous(), query.dtype),
            np.float32(scale),
            (self.arena.numpy(), elements_of(self.arena, self.native_dtype)),
            (layout_array(self.shape), self.layer, self.shape.num_kv_heads),
            entries,
            low,
            spans,
            tokens,
            elements_of(out, out.dtype),
        )
        threads = worthwhile_threads(int((spans[:, 1] - spans[:, 0]).sum()) * query.shape[1] * query.shape[2])
        if threads > 1 and THREADS_IN_USE.acquire(blocking=False):
            try:
                set_num_threads(threads)
                attend_chunk_parallel(*arguments)
            finally:
                THREADS_IN_USE.release()
        else:
            attend_chunk(*arguments)


def visible_spans(entries: Int32, first: int, number: int, low: int, window: int) -> tuple[npt.NDArray[np.int64], int]:
    """Of the stored positions >= low, in order: for each of ``number`` queries from position ``first`` on, the index of
    the first that it sees and one past the last, int64 [number, 2]; and how many there are.
    """
    if not len(entries):
        return np.zeros((number, 2), np.int64), 0
    queries = np.arange(first, first + number, dtype=np.int64)
    starts, stops = entries[:, ENTRY_FIRST].astype(np.int64), entries[:, ENTRY_FIRST] + entries[:, ENTRY_VALID]
    lengths = np.maximum(stops - np.maximum(starts, low), 0)
    before = np.cumsum(lengths) - lengths

    def up_to(positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """How many stored positions are >= low and <= these."""
        index = np.maximum(np.searchsorted(starts, positions, side="right") - 1, 0)
        inside = np.minimum(positions + 1, stops[index]) - np.maximum(starts[index], low)
        found: npt.NDArray[np.int64] = before[index] + np.clip(inside, 0, lengths[index])
        return found

    ends = up_to(queries)
    begins = up_to(queries - window) if window > 0 else np.zeros_like(ends)
    return np.stack([begins, ends], axis=1), int(lengths.sum())


def _attend_dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    first: int,
    key_positions: torch.Tensor,
    scale: float,
    window: int,
    out: torch.Tensor,
) -> None:
    """Query and out [n, heads, head_dim], key and value float32 [kv_heads, tokens, head_dim]; see `_Source.attend`."""
    for start in range(0, query.shape[0], _QUERY_CHUNK):
        stop = min(start + _QUERY_CHUNK, query.shape[0])
        positions = torch.arange(first + start, first + stop)
        # Keys after the chunk's last query are hidden from all of it.
        seen = int(torch.searchsorted(key_positions, first + stop - 1, right=True))
        distance = positions[:, None] - key_positions[None, :seen]
        visible = (distance >= 0) & (distance < window) if window > 0 else distance >= 0
        # Torch's CPU kernel for this is a tiled one: it never holds all scores.
        result = functional.scaled_dot_product_attention(
            query[None, start:stop].to(torch.float32).transpose(1, 2),
            key[None, :, :seen],
            value[None, :, :seen],
            attn_mask=visible,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[0],
        )[0].transpose(0, 1)
        out[start:stop] = result
        alone = ~visible.any(dim=1)
        if alone.any():
            out[start:stop][alone] = 0
