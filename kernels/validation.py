"""What :mod:`kernels.ops` refuses: shapes, dtypes and devices everywhere, contents where looking at them is free."""

from __future__ import annotations

import numpy as np
import torch

from kernels.layout import (
    CHUNK_TOKENS,
    ENTRY_WIDTH,
    FORMATS,
    JOB_DST_FORMAT,
    JOB_SRC2_OFFSET,
    JOB_SRC_FORMAT,
    NATIVE,
    KVShape,
)
from kernels.reference.tiles import native_dtype_of
from kernels.table import TableView


def check_arena(arena: torch.Tensor, shape: KVShape, layer: int) -> None:
    if arena.dtype != torch.uint8 or arena.dim() != 1 or not arena.is_contiguous():
        raise ValueError(f"the arena must be contiguous uint8 [bytes], got {arena.dtype} {tuple(arena.shape)}")
    if not 0 <= layer < shape.num_layers:
        raise ValueError(f"layer {layer} of a group of {shape.num_layers}")


def check_attention(
    query: torch.Tensor,
    arena: torch.Tensor,
    shape: KVShape,
    layer: int,
    table: TableView,
    window: int,
    out: torch.Tensor,
    *,
    has_plan: bool = False,
) -> None:
    """``has_plan``: the table was checked when it was planned."""
    check_arena(arena, shape, layer)
    if query.dim() != 3 or query.shape[2] != shape.head_dim or query.shape[1] % shape.num_kv_heads:
        raise ValueError(
            f"query must be [tokens, a multiple of {shape.num_kv_heads} heads, {shape.head_dim}],"
            f" got {tuple(query.shape)}"
        )
    native_dtype_of(shape, query.dtype)
    if out.shape != query.shape or out.dtype != query.dtype:
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)}, query {query.dtype} {tuple(query.shape)}")
    if query.device != arena.device or out.device != arena.device:
        raise ValueError(f"query on {query.device} and out on {out.device}, the arena on {arena.device}")
    if window < 0:
        raise ValueError(f"window must be 0 (none) or positive, got {window}")
    if not has_plan:
        check_table(table, arena.device)


def check_table(table: TableView, device: torch.device) -> None:
    if table.entries.dim() != 3:
        raise ValueError(f"table entries must be [sequences, max_entries, {ENTRY_WIDTH}], got {table.entries.dim()}-d")
    sequences, width, _ = table.entries.shape
    check_index("entries", table.entries, (sequences, width, ENTRY_WIDTH), device)
    check_index("num_entries", table.num_entries, (sequences,), device)
    check_index("query_first", table.query_first, (sequences,), device)


def check_mass(
    mass: torch.Tensor, arena: torch.Tensor, shape: KVShape, table: TableView, query_starts: torch.Tensor | None
) -> None:
    expected = (table.entries.shape[0], shape.num_kv_heads)
    if mass.dim() != 3 or mass.shape[:2] != expected or mass.dtype != torch.float32 or mass.device != arena.device:
        raise ValueError(
            f"mass must be float32 [{expected[0]}, {expected[1]}, chunks] on {arena.device},"
            f" got {mass.dtype} {tuple(mass.shape)} on {mass.device}"
        )
    if arena.device.type == "cpu":
        # In numpy: a call of torch's takes tens of times as long for a few numbers.
        last = table.query_first.numpy()
        if query_starts is not None:
            last = last + np.diff(query_starts.numpy()) - 1
        # A padding sequence's position means nothing.
        highest = int(np.where(table.num_entries.numpy() > 0, last, 0).max()) if last.size else -1
    else:
        highest = -1 if table.max_position is None else table.max_position
    if highest >= mass.shape[2] * CHUNK_TOKENS:
        raise ValueError(f"mass has {mass.shape[2]} chunks of {CHUNK_TOKENS}, a query is at position {highest}")


def check_index(name: str, tensor: torch.Tensor, expected: tuple[int, ...], device: torch.device) -> None:
    if tensor.dtype != torch.int32 or tensor.shape != expected:
        raise ValueError(f"{name} must be int32 {expected}, got {tensor.dtype} {tuple(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, the arena on {device}")


def check_bytes(source: torch.Tensor, target: torch.Tensor, rows: torch.Tensor) -> None:
    """Tensors and devices of a copy."""
    for name, tensor in (("source", source), ("target", target)):
        if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous uint8 [bytes], got {tensor.dtype} {tuple(tensor.shape)}")
        if tensor.storage_offset() % 2:
            raise ValueError(f"{name} starts at an odd byte of its storage")
    if rows.dtype != torch.int64 or rows.dim() != 2 or rows.shape[1] != 3:
        raise ValueError(f"rows must be int64 [rows, 3], got {rows.dtype} {tuple(rows.shape)}")
    devices = {tensor.device for tensor in (source, target, rows) if tensor.device.type != "cpu"}
    if len(devices) > 1 or (rows.device.type != "cpu" and devices - {source.device, target.device}):
        raise ValueError(f"source on {source.device}, target on {target.device} and rows on {rows.device}")


def check_copies(source: torch.Tensor, target: torch.Tensor, rows: torch.Tensor) -> None:
    if not rows.shape[0]:
        return
    starts, places, sizes = rows.unbind(1)
    if int(rows.min()) < 0 or bool((rows & 1).any()):
        raise ValueError("a copy has an odd or negative start or size")
    for name, tensor, first in (("source", source, starts), ("target", target, places)):
        # Not as first + size, which may overflow.
        if bool((first > tensor.numel() - sizes).any()):
            raise ValueError(f"a copy leaves the {name} of {tensor.numel()} bytes")
    order = places.argsort()
    order = order[sizes[order] > 0]
    if bool((places[order] + sizes[order])[:-1].gt(places[order][1:]).any()):
        raise ValueError("two copies write the same bytes of the target")


def check_jobs(jobs: torch.Tensor) -> None:
    target, source = jobs[:, JOB_DST_FORMAT], jobs[:, JOB_SRC_FORMAT]
    known = (target >= 0) & (target < len(FORMATS)) & (source >= 0) & (source < len(FORMATS))
    if not known.all():
        raise ValueError("a recode job names an unknown format code")
    # The codes are in order of lossiness (asserted by a test), so that no table is needed here.
    if (target < source).any():
        raise ValueError("a recode job goes to a less lossy format: lost precision does not come back")
    merges = (source == NATIVE.code) & (target != NATIVE.code)
    if (merges & (jobs[:, JOB_SRC2_OFFSET] < 0)).any():
        raise ValueError("a recode job from native to a quantised format needs two native tiles")
