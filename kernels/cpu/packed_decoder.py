"""Runs a decoder's layers over packed weights: numpy arrays over the memory of torch tensors, one call per half layer.

The work of a call is shared among threads where that pays; rows go to threads whole.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import config, set_num_threads

from kernels.cpu.decode_attention import THREADS_IN_USE, PreparedRows
from kernels.cpu.decoder_rows import (
    after_rows,
    after_rows_parallel,
    before_rows,
    before_rows_parallel,
    logits_rows,
    step_rows,
    step_rows_parallel,
)
from kernels.cpu.packed_weights import PackedWeights
from kernels.cpu.tiles import elements_of, layout_array
from kernels.layout import ENTRY_WIDTH, KVShape

Array = npt.NDArray[Any]

# Rows per call from which two threads pay: fewer are bound by reading the weights, which each thread does.
_PARALLEL_ROWS = 16


class PackedDecoder:
    """``cos`` [positions, head_dim] (halves repeated) and ``sin`` [positions, head_dim / 2]: given to each call as flat
    native arrays, since their table grows.
    """

    def __init__(self, weights: PackedWeights) -> None:
        sizes = weights.sizes
        self.weights = weights
        self._model = (weights.size_array, np.float32(sizes.epsilon))
        self._after = np.array([weights.final_norm, weights.head], np.int64)

    def warm_up(self) -> None:
        """Compile everything, or load it from the cache on disk, so that no request waits for it. Computes nothing."""
        dtype, no_rows = _TORCH_DTYPES[self.weights.flat.dtype.str], np.empty(0, np.int32)
        nothing, table = self.weights.flat[:0], np.empty((0, 1, ENTRY_WIDTH), np.int32)
        arena = torch.zeros(0, dtype=torch.uint8)
        weights, places = self.weights, self.weights.places
        rotary, flat, model = (nothing, nothing), weights.flat, self._model
        before = (nothing, flat, places[0], model, no_rows, rotary, nothing, nothing)
        after = (nothing, flat, places[0], model, 0, nothing)
        shape = KVShape(1, weights.sizes.kv_heads, weights.sizes.head_dim, flat.itemsize)
        step = (
            no_rows, no_rows, nothing, (flat, weights.embedding), places, model, rotary,
            (arena.numpy(), elements_of(arena, dtype)), layout_array(shape), (table, no_rows),
            np.empty((0, 2), np.int32), np.float32(1), 0,
        )  # fmt: skip
        for serial, parallel, arguments in (
            (before_rows, before_rows_parallel, before),
            (after_rows, after_rows_parallel, after),
            (step_rows, step_rows_parallel, step),
        ):
            serial(*arguments)
            if torch.get_num_threads() > 1:
                parallel(1, *arguments)
        self.logits(nothing, np.empty(0, np.int64))

    def before(
        self, layer: int, x: Array, positions: Array, rotary: tuple[Array, Array], query: Array, kv: Array
    ) -> None:
        """Norm, projections, rotation: x [tokens x hidden] to query [tokens x heads x head_dim] and ``kv`` [tokens x 2
        kv_heads x head_dim], all flat native.
        """
        places = self.weights.places[layer]
        arguments = (x, self.weights.flat, places, self._model, positions, rotary, query, kv)
        _run(before_rows, before_rows_parallel, arguments, len(positions))

    def after(self, layer: int, x: Array, attended: Array, tokens: int) -> None:
        """Output projection and feed-forward network, added to ``x``."""
        arguments = (x, self.weights.flat, self.weights.places[layer], self._model, tokens, attended)
        _run(after_rows, after_rows_parallel, arguments, tokens)

    def logits(self, x: Array, rows: Array) -> torch.Tensor:
        """Float32 [rows, vocab] of rows (int64) of ``x``."""
        result = torch.empty((len(rows), self.weights.sizes.vocab), dtype=torch.float32)
        logits_rows(x, rows, self.weights.flat, self._after, self._model, result.numpy())
        return result

    def step(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rotary: tuple[Array, Array],
        arena: torch.Tensor,
        shape: KVShape,
        rows: PreparedRows,
        slots: torch.Tensor,
        *,
        scale: float,
        window: int,
    ) -> torch.Tensor:
        """All layers of a step in which every sequence has one token; row i of the table is sequence i's.

        ``shape``'s group must hold all layers, in order. Returns hidden states [tokens, hidden].
        """
        dtype = _TORCH_DTYPES[self.weights.flat.dtype.str]
        x = torch.empty((len(ids), self.weights.sizes.hidden), dtype=dtype)
        arguments = (
            ids.numpy(),
            positions.numpy(),
            elements_of(x, dtype).reshape(-1),
            (self.weights.flat, self.weights.embedding),
            self.weights.places,
            self._model,
            rotary,
            (arena.numpy(), elements_of(arena, dtype)),
            layout_array(shape),
            (rows.entries, rows.num_entries),
            slots.numpy(),
            np.float32(scale),
            window,
        )
        _run(step_rows, step_rows_parallel, arguments, len(ids))
        return x


_TORCH_DTYPES = {"<f4": torch.float32, "<u2": torch.bfloat16}


def _run(serial: Any, parallel: Any, arguments: tuple[Any, ...], rows: int) -> None:
    threads = min(torch.get_num_threads(), config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
    if threads > 1 and rows >= _PARALLEL_ROWS and THREADS_IN_USE.acquire(blocking=False):
        try:
            set_num_threads(threads)
            parallel(threads, *arguments)
        finally:
            THREADS_IN_USE.release()
    else:
        serial(*arguments)
