"""The operations on the paged KV arena: validate, then hand to a backend. Start here.

``arena`` is everywhere a contiguous uint8 [bytes] tensor that holds one layer group as ``kernels.layout`` lays it out
(a native view must be possible: its storage offset is a multiple of 4); ``shape`` is the group's KV shape and
``layer`` an index inside the group. The native dtype (float32, bfloat16 or float16) is that of the tensors given.

Every operation takes ``backend``: None for the fastest one that serves the arena's device, a name of
:data:`kernels.backend.BACKENDS`, or what :func:`kernels.backend.select_backend` returned. All tensors must be on one
device. Nothing here keeps state. Errors are ValueErrors; contents of tables, slots and jobs are not checked on a GPU
(that would wait for it), so an executor must only pass what the cache manager made.
"""

from __future__ import annotations

import importlib.util

import torch

from kernels.backend import KernelBackend, select_backend
from kernels.layout import ENTRY_WIDTH, JOB_WIDTH, KVShape
from kernels.plan import DecodePlan
from kernels.reference.tiles import native_dtype_of
from kernels.table import TableView
from kernels.validation import (
    check_arena,
    check_attention,
    check_bytes,
    check_copies,
    check_index,
    check_jobs,
    check_mass,
    check_table,
)

Backend = KernelBackend | str | None


def write_kv(
    arena: torch.Tensor,
    shape: KVShape,
    layer: int,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    *,
    backend: Backend = None,
) -> None:
    """Store new tokens in native tiles.

    Args:
        arena: see the module.
        shape: see the module.
        layer: see the module.
        key: [tokens, kv_heads, head_dim], native dtype; any strides.
        value: like ``key``.
        slots: int32 [tokens, 2]: block offset in units of 256 bytes, index of the token inside its native block. No
            two tokens may share a slot.
        backend: see the module.
    """
    check_arena(arena, shape, layer)
    expected = (key.shape[0], shape.num_kv_heads, shape.head_dim)
    if key.shape != expected or value.shape != expected:
        raise ValueError(f"key {tuple(key.shape)} and value {tuple(value.shape)} must be {expected}")
    if value.dtype != key.dtype:
        raise ValueError(f"key is {key.dtype}, value {value.dtype}")
    native_dtype_of(shape, key.dtype)
    check_index("slots", slots, (key.shape[0], 2), arena.device)
    _chosen(backend, arena).write_kv(arena, shape, layer, key, value, slots)


def plan_decode(
    table: TableView,
    shape: KVShape,
    *,
    heads: int,
    native_dtype: torch.dtype,
    window: int = 0,
    mass: bool = False,
    backend: Backend = None,
) -> DecodePlan:
    """Prepare :func:`decode_attention` for every layer of a group at once: call it once per step and group.

    On a GPU this lists the batch's work on the device and allocates scratch; where ``table.max_position`` is None it
    waits for the device. ``heads``: query heads; ``mass``: whether a layer will ask for the share of attention.
    """
    check_table(table, table.entries.device)
    if heads < 1 or heads % shape.num_kv_heads:
        raise ValueError(f"{heads} query heads for {shape.num_kv_heads} KV heads")
    dtype = native_dtype_of(shape, native_dtype)
    if window < 0:
        raise ValueError(f"window must be 0 (none) or positive, got {window}")
    chosen = _chosen(backend, table.entries)
    prepared = chosen.plan_decode(table, shape, heads, dtype, window=window, mass=mass)
    return DecodePlan(table, shape, heads, dtype, window, mass, chosen, prepared)


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
    plan: DecodePlan | None = None,
    backend: Backend = None,
) -> None:
    """Attention of one new token per sequence over its stored KV, its own (already written) included.

    No result depends, not even in the last bit, on the sizes of the blocks that hold the same tiles.

    Args:
        query: [sequences, heads, head_dim], native dtype; heads is a multiple of the KV heads.
        arena: see the module.
        shape: see the module.
        layer: see the module.
        table: block tables; ``query_first`` holds each query's absolute position.
        scale: factor of the products, usually head_dim ** -0.5.
        window: if positive, only positions > query position - window are attended to (the current token counts).
        out: like ``query``, overwritten; a sequence without entries gets zeros.
        mass: None, or float32 [sequences, kv_heads, chunks], overwritten with the share of attention that chunk c,
            positions 16 c .. 16 c + 15, gets from the query heads of a KV head, on average over these: it adds up
            to 1 over the chunks, evicted or hidden chunks have 0, a sequence without entries has 0 throughout. The
            chunks must reach the largest query position. ``out`` is the same to the bit with and without it.
        plan: of :func:`plan_decode` for this table, or None: then the call makes its own.
        backend: see the module.
    """
    check_attention(query, arena, shape, layer, table, window, out, has_plan=plan is not None)
    chosen = _chosen(backend, arena)
    if plan is not None:
        plan.check(chosen, query, shape, table, window, mass=mass is not None)
    sequences = table.entries.shape[0]
    if query.shape[0] != sequences:
        raise ValueError(f"{query.shape[0]} queries for {sequences} sequences")
    if mass is not None:
        check_mass(mass, arena, shape, table, None)
    chosen.decode_attention(
        query, arena, shape, layer, table,
        scale=scale, window=window, out=out, mass=mass, prepared=None if plan is None else plan.prepared,
    )  # fmt: skip


def attention_mass(
    query: torch.Tensor,
    arena: torch.Tensor,
    shape: KVShape,
    layer: int,
    table: TableView,
    query_starts: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    last: int,
    mass: torch.Tensor,
    backend: Backend = None,
) -> None:
    """Share of attention per chunk of 16 positions, from the last queries of each sequence's new tokens; keys only.

    The observation window of SnapKV (Li et al. 2024): what the end of a prompt looks at is what its answer will. The
    result does not depend, not even in the last bit, on the sizes of the blocks that hold the same tiles.

    Args:
        query: [tokens, heads, head_dim], native dtype, the sequences one after the other, as for prefill.
        arena: see the module.
        shape: see the module.
        layer: see the module.
        table: block tables; query i of sequence s is at position ``query_first[s] + i``.
        query_starts: int32 [sequences + 1], first query of each sequence, and the number of all.
        scale: factor of the products, usually head_dim ** -0.5.
        window: see :func:`decode_attention`.
        last: how many queries of each sequence count, at least 1; all where it has fewer.
        mass: as for :func:`decode_attention`, averaged over these queries too; a sequence without queries has 0,
            a query that sees nothing (its own token is not stored) adds nothing.
        backend: see the module.
    """
    check_attention(query, arena, shape, layer, table, window, query)
    check_index("query_starts", query_starts, (table.entries.shape[0] + 1,), arena.device)
    if last < 1:
        raise ValueError(f"last must be at least 1, got {last}")
    check_mass(mass, arena, shape, table, query_starts)
    _chosen(backend, arena).attention_mass(
        query, arena, shape, layer, table, query_starts, scale=scale, window=window, last=last, mass=mass
    )


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
    backend: Backend = None,
) -> None:
    """Causal attention of each sequence's new tokens over its stored KV, these tokens' (already written) included.

    Args:
        query: [tokens, heads, head_dim], native dtype, the sequences one after the other.
        arena: see the module.
        shape: see the module.
        layer: see the module.
        table: block tables; query i of sequence s is at position ``query_first[s] + i``.
        query_starts: int32 [sequences + 1], first query of each sequence, and the number of all.
        scale: factor of the products, usually head_dim ** -0.5.
        window: see :func:`decode_attention`.
        out: like ``query``, overwritten.
        backend: see the module.
    """
    check_attention(query, arena, shape, layer, table, window, out)
    check_index("query_starts", query_starts, (table.entries.shape[0] + 1,), arena.device)
    _chosen(backend, arena).prefill_attention(
        query, arena, shape, layer, table, query_starts, scale=scale, window=window, out=out
    )


def recode(
    arena: torch.Tensor,
    shape: KVShape,
    jobs: torch.Tensor,
    *,
    native_dtype: torch.dtype | None = None,
    backend: Backend = None,
) -> None:
    """Fill destination tiles (all layers) from other tiles, out of place: the blocks' conversion and copying.

    To the same format, bytes are copied. Two native tiles (16 + 16 tokens) make one quantised tile. A quantised tile
    becomes a lossier one: keys or values with the same number of bits are copied, others dequantised and quantised
    again. No job may read what another one writes.

    Args:
        arena: see the module.
        shape: see the module.
        jobs: int32 [jobs, 8], columns ``kernels.layout.JOB_*``.
        native_dtype: may be left out for float32 arenas only (2-byte elements do not tell).
        backend: see the module.

    Raises:
        ValueError: also for a job to a less lossy format, and for a native source without its second tile.
    """
    check_arena(arena, shape, 0)
    native_dtype_of(shape, native_dtype)
    check_index("jobs", jobs, (jobs.shape[0], JOB_WIDTH), arena.device)
    if jobs.device.type == "cpu":
        check_jobs(jobs)
    _chosen(backend, arena).recode(arena, shape, jobs, native_dtype=native_dtype)


def gather_kv(
    arena: torch.Tensor,
    shape: KVShape,
    layer: int,
    entries: torch.Tensor,
    num_entries: int,
    *,
    native_dtype: torch.dtype | None = None,
    backend: Backend = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one sequence in position order, each float32 [tokens, kv_heads, head_dim], dequantised.

    Native values come back exactly. ``entries``: int32 [>= num_entries, 4]; ``native_dtype``: see :func:`recode`.
    """
    check_arena(arena, shape, layer)
    native_dtype_of(shape, native_dtype)
    check_index("entries", entries, (entries.shape[0], ENTRY_WIDTH), arena.device)
    if not 0 <= num_entries <= entries.shape[0]:
        raise ValueError(f"{num_entries} entries asked for, {entries.shape[0]} given")
    return _chosen(backend, arena).gather_kv(arena, shape, layer, entries, num_entries, native_dtype=native_dtype)


def copy_bytes(source: torch.Tensor, target: torch.Tensor, rows: torch.Tensor, *, backend: Backend = None) -> None:
    """Copy runs of bytes between two tensors of the same or of different devices: blocks to the host and back.

    With a GPU this runs on its current stream and waits for nothing where host memory is pinned, whose owner then must
    keep it, and leave it alone, until the stream is done. Host memory that is not pinned is staged, which waits.

    Args:
        source: contiguous uint8 [bytes], on the CPU or a GPU; its storage offset is even.
        target: like ``source``; may be the same tensor.
        rows: int64 [rows, 3]: source byte, target byte, number of bytes, all even. No two rows may write the same
            byte, and none what any row reads. On the CPU they are checked; on the GPU's side they are trusted.
        backend: see the module.

    Raises:
        ValueError: also for rows (on the CPU) that are odd, leave a tensor or overlap in the target.
    """
    check_bytes(source, target, rows)
    if rows.device.type == "cpu":
        check_copies(source, target, rows)
    _chosen(backend, target if target.device.type != "cpu" else source).copy_bytes(source, target, rows)


def warm_up(device: torch.device, native_dtype: torch.dtype, *, backend: str | None = None) -> None:
    """Compile what a backend compiles at first use, so that no request waits for it. Call it before serving.

    Numba kernels take some 20 s of processor time when their cache on disk is empty, else a fraction of a second.
    Other backends do nothing here. Raises ValueError for an unknown backend or native dtype.
    """
    select_backend(device, backend)
    if device.type == "cpu" and backend != "reference" and importlib.util.find_spec("numba"):
        from kernels import cpu  # noqa: PLC0415 - numba is optional

        cpu.warm_up(native_dtype)


def _chosen(backend: Backend, arena: torch.Tensor) -> KernelBackend:
    if backend is None or isinstance(backend, str):
        return select_backend(arena.device, backend)
    return backend
