"""Decode attention: one query per sequence. The kernel is in :mod:`kernels.cpu.attend_rows`.

A call takes tens of microseconds on top of its work, most of it torch's for looking at tensors. What belongs to the
table is therefore looked at once per step.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import config, set_num_threads

from kernels.cpu.attend_rows import attend_rows, attend_rows_parallel
from kernels.cpu.tiles import elements_of, layout_array
from kernels.layout import KVShape
from kernels.table import TableView

Int32 = npt.NDArray[np.int32]

# Products of query and key elements from which sharing among threads pays: about a third of a millisecond for one.
_PARALLEL_WORK = 1 << 20
# Numba has one set of threads per process, and one of its implementations aborts when two threads use it at once.
# Whoever finds it taken computes alone.
THREADS_IN_USE = threading.Lock()


@dataclass(frozen=True)
class PreparedRows:
    """Query rows, each of a (sequence, position), and the table that they attend to, as arrays over its memory.

    ``pairs``: of a row and a position that it may attend to.
    """

    entries: Int32
    num_entries: Int32
    sequences: Int32
    positions: Int32
    pairs: int

    @classmethod
    def of(cls, table: TableView, sequences: Int32, positions: Int32) -> PreparedRows:
        pairs = int(positions.sum()) + len(positions)
        entries, counts = table.entries.contiguous().numpy(), table.num_entries.contiguous().numpy()
        return cls(entries, counts, sequences, positions, pairs)


def plan_decode(
    table: TableView,
    shape: KVShape,  # noqa: ARG001 - the signature is every backend's
    heads: int,  # noqa: ARG001
    native_dtype: torch.dtype,  # noqa: ARG001
    *,
    window: int,  # noqa: ARG001
    mass: bool,  # noqa: ARG001
) -> PreparedRows | None:
    """See :func:`kernels.ops.plan_decode`. None where entries would have to be copied: offsets may change later."""
    return _rows(table) if table.entries.is_contiguous() else None


def _rows(table: TableView) -> PreparedRows:
    sequences = np.arange(table.entries.shape[0], dtype=np.int32)
    return PreparedRows.of(table, sequences, table.query_first.contiguous().numpy())


def decode_attention(
    query: torch.Tensor,
    arena: torch.Tensor,
    shape: KVShape,
    layer: int,
    table: TableView,
    *,
    scale: float,
    window: int = 0,
    out: torch.Tensor,
    mass: torch.Tensor | None = None,
    prepared: object = None,
) -> None:
    """See :func:`kernels.ops.decode_attention`."""
    rows = prepared if isinstance(prepared, PreparedRows) else _rows(table)
    attend(query, arena, shape, layer, rows, scale, window, out, mass=mass)


def attend(
    query: torch.Tensor,
    arena: torch.Tensor,
    shape: KVShape,
    layer: int,
    rows: PreparedRows,
    scale: float,
    window: int,
    out: torch.Tensor,
    *,
    mass: torch.Tensor | None = None,
    threads: int | None = None,
) -> None:
    """Attention of query rows [rows, heads, head_dim] into ``out``, alike.

    ``mass``: float32 [rows, kv_heads, chunks], overwritten, or None.
    ``threads``: how many share the work; None: torch's number, or one where sharing does not pay.
    """
    result = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
    shares = None if mass is None else mass.contiguous()
    dtype, codes = query.dtype, arena.numpy()
    arguments = (
        elements_of(query.contiguous(), dtype),
        np.float32(scale),
        (codes, elements_of(arena, dtype)),
        (layout_array(shape), layer, shape.num_kv_heads),
        (rows.entries, rows.num_entries),
        (rows.sequences, rows.positions),
        window,
        elements_of(result, dtype),
        np.empty((len(rows.positions), shape.num_kv_heads, 0), np.float32) if shares is None else shares.numpy(),
    )
    if threads is None:
        threads = worthwhile_threads(rows.pairs * query.shape[1] * query.shape[2])
    _run(arguments, min(threads, config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
    if result is not out:
        out.copy_(result)
    if mass is not None and shares is not None and shares is not mass:
        mass.copy_(shares)


def worthwhile_threads(work: int) -> int:
    """How many threads should share so many products of query and key elements."""
    # The first call takes the parallel form whatever its size, so that warming an engine up compiles both: compiled
    # later, it would stall every running request for as long.
    is_first = not getattr(attend_rows_parallel, "signatures", True)
    return torch.get_num_threads() if is_first or work >= _PARALLEL_WORK else 1


def _run(arguments: tuple[Any, ...], threads: int) -> None:
    if threads > 1 and THREADS_IN_USE.acquire(blocking=False):
        try:
            set_num_threads(threads)
            attend_rows_parallel(threads, *arguments)
        finally:
            THREADS_IN_USE.release()
    else:
        attend_rows(*arguments)
