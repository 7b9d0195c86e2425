"""The fixed configurations that `make gpu-check` times, and how each is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kernels.gpu_check.timing import Clock, arena_bytes, uniform_cache
from kernels.layout import CHUNK_TOKENS, FORMATS, INT4, INT8, JOB_WIDTH, K8V4, NATIVE, OFFSET_UNIT, KVFormat, KVShape
from kernels.table import TableView
from kernels.triton.attention_mass import attention_mass
from kernels.triton.copy_bytes import copy_bytes
from kernels.triton.decode_attention import decode_attention_launcher
from kernels.triton.decode_plan import DecodeScratch, decode_programs, launch_plan, most_pieces
from kernels.triton.prefill_attention import prefill_attention_launcher
from kernels.triton.recode import recode_launcher
from kernels.triton.write_kv import write_kv

Row = dict[str, Any]


class SkippedError(Exception):
    """A point that this device cannot measure; the message says why."""


@dataclass(frozen=True)
class Scale:
    """Sizes of everything. All figures are for one layer."""

    shape: KVShape
    group: int
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    block_sizes: tuple[int, ...]
    core: tuple[tuple[int, int, int], ...]  # (block size, context, batch), for every format, before all others
    new_tokens: int
    prefill_contexts: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16


# A layer of Llama 3 8B. The core has the claims' corners and the shapes where launches or few programs hurt most.
FULL = Scale(
    KVShape(1, 8, 128, 2), 4, (1024, 8192, 32768, 131072), (1, 16, 64), (16, 64, 256),
    ((64, 8192, 16), (64, 32768, 16), (64, 8192, 64), (64, 32768, 1), (64, 131072, 1), (64, 1024, 64)),
    2048, (2048, 8192, 32768),
)  # fmt: skip
MINI = Scale(KVShape(1, 1, 64, 2), 2, (64, 96), (1, 2), (32,), ((32, 64, 2),), 32, (64,))


@dataclass(frozen=True)
class Point:
    """One configuration; ``key`` names it in results, so that a later run can go on where one stopped."""

    key: str
    measure: Callable[[], Row]


def all_points(scale: Scale, clock: Clock, bandwidth: float) -> Iterator[Point]:
    """Core decode points, then prefill, recode, mass, write and copies, then decode's whole grid."""
    whole = [
        (size, tokens, batch) for tokens in scale.contexts for batch in scale.batches for size in scale.block_sizes
    ]

    def decode(places: list[tuple[int, int, int]]) -> Iterator[Point]:
        for size, tokens, batch in places:
            for kv_format in FORMATS:
                if size >= kv_format.tile_tokens:
                    key = f"decode {kv_format.name} block {size} context {tokens} batch {batch}"
                    yield Point(key, partial(_decode, scale, clock, bandwidth, kv_format, size, tokens, batch))

    yield from decode(list(scale.core))
    for context in scale.prefill_contexts:
        for kv_format in (NATIVE, INT4):
            key = f"prefill {kv_format.name} new {scale.new_tokens} context {context}"
            yield Point(key, partial(_prefill, scale, clock, kv_format, max(context, scale.new_tokens)))
    for kv_format in (INT8, K8V4, INT4):
        yield Point(f"recode {kv_format.name}", partial(_recode, scale, clock, bandwidth, kv_format))
    context = scale.prefill_contexts[-1]
    yield Point(f"attention_mass context {context}", partial(_mass, scale, clock, context))
    yield Point("write_kv", partial(_write, scale, clock))
    if clock.device.type == "cuda":
        for run_bytes in (2 << 10, 16 << 10, 64 << 10):
            for to_card in (True, False):
                key = f"copy_bytes {'to card' if to_card else 'to host'} runs {run_bytes}"
                yield Point(key, partial(_copy, clock, run_bytes, to_card=to_card))
    yield from decode([place for place in whole if place not in scale.core])


def _room(needed: int, device: torch.device) -> None:
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        if needed * 1.1 + (2 << 30) > free:
            raise SkippedError(f"needs {needed / 2**30:.0f} GiB, {free / 2**30:.0f} are free")


def _queries(scale: Scale, count: int, device: torch.device) -> torch.Tensor:
    heads = scale.shape.num_kv_heads * scale.group
    return torch.randn((count, heads, scale.shape.head_dim), device=device).to(scale.dtype)


def _decode(
    scale: Scale, clock: Clock, bandwidth: float, kv_format: KVFormat, size: int, tokens: int, batch: int
) -> Row:
    device, shape = clock.device, scale.shape
    moved = arena_bytes(shape, kv_format, size, batch, tokens)
    _room(moved, device)
    arena, table = uniform_cache(shape, kv_format, size, batch, tokens, device)
    query = _queries(scale, batch, device)
    out = torch.empty_like(query)
    pieces = most_pieces(batch, tokens)
    programs = decode_programs(device)
    launch = partial(
        decode_attention_launcher, query, arena, shape, 0, table, scale=shape.head_dim**-0.5, window=0, out=out,
        programs=programs,
    )  # fmt: skip
    rows = (batch, query.shape[1], shape.head_dim)
    plain = DecodeScratch.allocate(rows, shape.num_kv_heads, pieces, device)
    plan = partial(launch_plan, table.num_entries, table.query_first, window=0)
    plan(scratch=plain)
    micros = clock.micros(partial(launch, scratch=plain), graph=True)
    row: Row = {
        "call": "decode", "format": kv_format.name, "block_size": size, "context": tokens, "batch": batch,
        "us": round(micros, 2), "gbps": round(moved / micros / 1e3, 1),
        "share_of_copy": round(moved / micros / 1e3 / bandwidth, 3),
    }  # fmt: skip
    if (size, tokens, batch) in scale.core:
        mass = torch.empty((batch, shape.num_kv_heads, tokens // CHUNK_TOKENS), device=device)
        more = DecodeScratch.allocate(rows, shape.num_kv_heads, pieces, device, mass=True)
        plan(scratch=more)
        # Once per step and group, where all else is once per layer.
        row["plan_us"] = round(clock.micros(partial(plan, scratch=more), graph=True), 2)
        row["with_mass_us"] = round(clock.micros(partial(launch, scratch=more, mass=mass), graph=True), 2)
    return row


def _prefill(scale: Scale, clock: Clock, kv_format: KVFormat, context: int) -> Row:
    device, shape, new = clock.device, scale.shape, scale.new_tokens
    arena, end = uniform_cache(shape, kv_format, scale.block_sizes[-1], 1, context, device)
    table = TableView(end.entries, end.num_entries, end.query_first - new + 1)
    query = _queries(scale, new, device)
    out, starts = torch.empty_like(query), torch.tensor([0, new], dtype=torch.int32, device=device)
    micros = clock.micros(
        partial(
            prefill_attention_launcher, query, arena, shape, 0, table, starts,
            scale=shape.head_dim**-0.5, window=0, out=out,
        ),
        graph=True,
    )  # fmt: skip
    heads = query.shape[1]
    flops = 4 * heads * shape.head_dim * new * (2 * context - new + 1) / 2
    row: Row = {"call": "prefill", "format": kv_format.name, "new": new, "context": context, "us": round(micros, 2)}
    row |= {"tflops": round(flops / micros / 1e6, 2), "sdpa_us": round(_sdpa(scale, clock, query, context), 2)}
    return row


def _sdpa(scale: Scale, clock: Clock, query: torch.Tensor, context: int) -> float:
    """Attention by torch over the same tokens: contiguous, native, nothing to gather."""
    from torch.nn.attention.bias import causal_lower_right  # noqa: PLC0415 - warns of being new on import

    key = torch.randn((1, query.shape[1], context, scale.shape.head_dim), device=clock.device).to(scale.dtype)
    rows = query.transpose(0, 1)[None].contiguous()
    # Keys for every query head, as torch's kernel with this mask wants them; it reads no less for it.
    mask = causal_lower_right(rows.shape[2], context)
    attention = torch.nn.functional.scaled_dot_product_attention
    return clock.micros(partial(attention, rows, key, key, attn_mask=mask))


def _recode(scale: Scale, clock: Clock, bandwidth: float, target: KVFormat) -> Row:
    shape, device = scale.shape, clock.device
    tokens = scale.contexts[-1]
    size, units = scale.block_sizes[0], shape.block_bytes(NATIVE, scale.block_sizes[0]) // OFFSET_UNIT
    arena, table = uniform_cache(shape, NATIVE, size, 1, tokens, device)
    # Native tiles in the table's order, two per job; the targets lie behind, one tile each.
    tiles = size // 16
    offsets = table.entries[0, :, 0].repeat_interleave(tiles)
    places = torch.arange(tiles, device=device).repeat(len(table.entries[0]))
    count = tokens // 32
    target_units = -(-shape.tile_stride(target) // OFFSET_UNIT)
    jobs = torch.zeros((count, JOB_WIDTH), dtype=torch.int32, device=device)
    jobs[:, 0] = target.code
    jobs[:, 1] = arena.numel() // OFFSET_UNIT + torch.arange(count, device=device) * target_units
    jobs[:, 4], jobs[:, 5], jobs[:, 6], jobs[:, 7] = offsets[::2], places[::2], offsets[1::2], places[1::2]
    grown = torch.cat((arena, arena.new_zeros(count * target_units * OFFSET_UNIT)))
    micros = clock.micros(partial(recode_launcher, grown, shape, jobs, scale.dtype), graph=True)
    moved = count * (2 * shape.tile_stride(NATIVE) + shape.tile_stride(target))
    gbps = moved / micros / 1e3
    return {
        "call": "recode", "format": target.name, "tokens": tokens, "block_units": units, "us": round(micros, 2),
        "gbps": round(gbps, 1), "share_of_copy": round(gbps / bandwidth, 3),
    }  # fmt: skip


def _mass(scale: Scale, clock: Clock, context: int) -> Row:
    last = min(64, scale.new_tokens)
    arena, end = uniform_cache(scale.shape, NATIVE, scale.block_sizes[-1], 1, context, clock.device)
    table = TableView(end.entries, end.num_entries, end.query_first - last + 1)
    query = _queries(scale, last, clock.device)
    starts = torch.tensor([0, last], dtype=torch.int32, device=clock.device)
    mass = torch.empty((1, scale.shape.num_kv_heads, context // CHUNK_TOKENS), device=clock.device)
    run = partial(attention_mass, query, arena, scale.shape, 0, table, starts, scale=0.1, last=last, mass=mass)
    return {"call": "attention_mass", "last": last, "context": context, "us": round(clock.micros(run), 2)}


def _write(scale: Scale, clock: Clock) -> Row:
    arena, table = uniform_cache(scale.shape, NATIVE, scale.block_sizes[0], 1, scale.contexts[0], clock.device)
    tokens, size = scale.contexts[0], scale.block_sizes[0]
    key = torch.randn((tokens, scale.shape.num_kv_heads, scale.shape.head_dim), device=clock.device).to(scale.dtype)
    index = torch.arange(tokens, device=clock.device, dtype=torch.int32)
    slots = torch.stack((table.entries[0, index // size, 0], index % size), dim=1)
    micros = clock.micros(partial(write_kv, arena, scale.shape, 0, key, key, slots))
    return {"call": "write_kv", "tokens": tokens, "us": round(micros, 2)}


def _copy(clock: Clock, run_bytes: int, *, to_card: bool) -> Row:
    """16 MiB in shuffled runs between the card and pinned host memory; ``whole_us``: as one copy by the driver."""
    total = 16 << 20
    card, host = torch.zeros(total, dtype=torch.uint8, device=clock.device), torch.zeros(total, dtype=torch.uint8)
    pinned, count = host.pin_memory(), total // run_bytes
    sizes = torch.full((count,), run_bytes)
    rows = torch.stack((torch.arange(count) * run_bytes, torch.randperm(count) * run_bytes, sizes), dim=1)
    source, target = (pinned, card) if to_card else (card, pinned)
    micros = clock.micros(partial(copy_bytes, source, target, rows))
    whole = clock.micros(partial(target.copy_, source, non_blocking=True))
    return {
        "call": "copy_bytes", "to": "card" if to_card else "host", "run_bytes": run_bytes,
        "us": round(micros, 2), "gbps": round(total / micros / 1e3, 1), "whole_us": round(whole, 2),
    }  # fmt: skip
