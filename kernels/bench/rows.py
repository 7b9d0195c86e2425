"""Rows of the CPU benchmark: decode against torch, attention mass, prefill, recode, write.

Torch's side of decode: a pool of blocks in the layout that torch likes best ([blocks, block_size, kv_heads, head_dim]
per keys and values), gathered through the same block table, then `scaled_dot_product_attention`. ``folded`` is the
same with the query heads of a KV head laid side by side as queries, which few do and torch is fastest at.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels import ops
from kernels.bench.measure import Case, interleaved, paged_cache
from kernels.layout import CHUNK_TOKENS, FORMATS, JOB_WIDTH, NATIVE, OFFSET_UNIT, KVFormat, KVShape
from kernels.table import TableView

Row = dict[str, Any]


def decode(case: Case, dtype: torch.dtype, bandwidth: float, rounds: int) -> Row:
    """Milliseconds of every format, of native with the attention mass, and of torch; ``floor``: bytes / bandwidth."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn((case.sequences, case.heads, case.head_dim), generator=generator).to(dtype)
    calls: dict[str, Callable[[], object]] = {}
    for kv_format in FORMATS:
        arena, table = paged_cache(case, kv_format, dtype, generator)
        call = partial(
            ops.decode_attention, query, arena, case.shape(dtype), 0, table,
            scale=case.scale, out=torch.empty_like(query),
        )  # fmt: skip
        calls[kv_format.name] = call
        if kv_format.is_native:
            mass = torch.empty((case.sequences, case.kv_heads, -(-case.tokens // CHUNK_TOKENS)))
            calls["native_with_mass"] = partial(call, mass=mass)
    calls |= torch_decode(case, query, generator)
    seconds = interleaved(calls, rounds)
    floors = {name: case.stored_bytes(kv_format, dtype) / bandwidth for name, kv_format in _by_name().items()}
    return {
        "row": "decode",
        "case": str(case),
        "context": case.tokens,
        "ms": _ms(seconds),
        "floor_ms": _ms(floors),
        "ratio_vs_sdpa": round(seconds["sdpa"] / seconds["native"], 3),
        "ratio_vs_folded": round(seconds["folded"] / seconds["native"], 3),
        "over_native": {name: round(seconds[name] / seconds["native"], 3) for name in floors},
        "bandwidth_share": {name: round(floors[name] / seconds[name], 3) for name in floors},
        "mass_over_native": round(seconds["native_with_mass"] / seconds["native"], 3),
    }


def torch_decode(case: Case, query: torch.Tensor, generator: torch.Generator) -> dict[str, Callable[[], object]]:
    """Torch's two ways, over random keys and values; both gather first."""
    blocks, group = case.sequences * case.tokens // case.block_size, case.heads // case.kv_heads
    size = (blocks, case.block_size, case.kv_heads, case.head_dim)
    keys, values = (torch.randn(size, generator=generator).to(query.dtype) for _ in range(2))
    index = torch.randperm(blocks, generator=generator).view(case.sequences, -1)

    def gathered(pool: torch.Tensor) -> torch.Tensor:
        return pool[index].view(case.sequences, case.tokens, case.kv_heads, case.head_dim).transpose(1, 2)

    def sdpa() -> torch.Tensor:
        return scaled_dot_product_attention(query[:, :, None], gathered(keys), gathered(values), enable_gqa=True)

    def folded() -> torch.Tensor:
        rows = query.view(case.sequences, case.kv_heads, group, case.head_dim)
        return scaled_dot_product_attention(rows, gathered(keys), gathered(values))

    return {"sdpa": sdpa, "folded": folded}


def prefill(case: Case, new_tokens: int, dtype: torch.dtype, rounds: int) -> Row:
    """``new_tokens`` at the end of each sequence; ``flops``: 4 x heads x head_dim per pair that causality leaves."""
    generator = torch.Generator().manual_seed(1)
    query = torch.randn((case.sequences * new_tokens, case.heads, case.head_dim), generator=generator).to(dtype)
    starts = torch.arange(0, len(query) + 1, new_tokens, dtype=torch.int32)
    calls: dict[str, Callable[[], object]] = {}
    for kv_format in FORMATS:
        arena, end = paged_cache(case, kv_format, dtype, generator)
        table = TableView(end.entries, end.num_entries, end.query_first - new_tokens + 1)
        calls[kv_format.name] = partial(
            ops.prefill_attention, query, arena, case.shape(dtype), 0, table, starts,
            scale=case.scale, out=torch.empty_like(query),
        )  # fmt: skip
        if kv_format.is_native:
            mass = torch.empty((case.sequences, case.kv_heads, -(-case.tokens // CHUNK_TOKENS)))
            calls["attention_mass"] = partial(
                ops.attention_mass, query, arena, case.shape(dtype), 0, table, starts,
                scale=case.scale, last=min(64, new_tokens), mass=mass,
            )  # fmt: skip
    keys, values = torch.randn((2, case.sequences, case.kv_heads, case.tokens, case.head_dim), generator=generator).to(
        dtype
    )
    rows = query.view(case.sequences, new_tokens, case.heads, case.head_dim).transpose(1, 2)
    mask = torch.ones(new_tokens, case.tokens, dtype=torch.bool).tril(case.tokens - new_tokens)
    calls["sdpa"] = partial(scaled_dot_product_attention, rows, keys, values, attn_mask=mask, enable_gqa=True)
    seconds = interleaved(calls, rounds)
    flops = 2 * case.sequences * case.heads * case.head_dim * new_tokens * (2 * case.tokens - new_tokens + 1)
    gflops = round(flops / seconds["native"] / 1e9, 1)
    return {"row": "prefill", "case": f"{case}, {new_tokens} new", "ms": _ms(seconds), "gflops": gflops}


def storage(dtype: torch.dtype, bandwidth: float, rounds: int, *, tokens: int = 4096) -> Row:
    """Write of new tokens, and recoding of native tiles of a 6-layer group; floors are bytes read and written."""
    generator = torch.Generator().manual_seed(2)
    shape = KVShape(6, 2, 64, dtype.itemsize)
    calls: dict[str, Callable[[], object]] = {}
    floors: dict[str, float] = {}
    for target in FORMATS[1:]:
        arena, jobs, moved = recode_jobs(shape, target, tokens, dtype, generator)
        calls[f"recode_{target.name}"] = partial(ops.recode, arena, shape, jobs, native_dtype=dtype)
        floors[f"recode_{target.name}"] = moved / bandwidth
    units = shape.block_bytes(NATIVE, 64) // OFFSET_UNIT
    arena = torch.zeros(tokens // 64 * units * OFFSET_UNIT, dtype=torch.uint8)
    keys = torch.randn((tokens, 2, 64), generator=generator).to(dtype)
    place = torch.randperm(tokens, generator=generator)
    slots = torch.stack((place // 64 * units, place % 64), dim=1).to(torch.int32)
    calls["write_kv"] = partial(ops.write_kv, arena, shape, 0, keys, keys, slots)
    floors["write_kv"] = 4 * keys.numel() * dtype.itemsize / bandwidth
    seconds = interleaved(calls, rounds)
    case = f"{tokens} tokens, 2 heads of 64; recode: 6 layers"
    return {"row": "storage", "case": case, "ms": _ms(seconds), "floor_ms": _ms(floors)}


def recode_jobs(
    shape: KVShape, target: KVFormat, tokens: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """An arena of random native tiles and room for the targets, the jobs, and the bytes that they read and write."""
    # With 2-byte elements a quantised tile of 32 tokens may be larger than a native one of 16.
    units, target_units = (-(-shape.tile_stride(kind) // OFFSET_UNIT) for kind in (NATIVE, target))
    count = tokens // 32
    elements = count * (2 * units + target_units) * OFFSET_UNIT // dtype.itemsize
    arena = torch.randn(elements, generator=generator).to(dtype).view(torch.uint8)
    jobs = torch.zeros((count, JOB_WIDTH), dtype=torch.int32)
    first = torch.arange(count, dtype=torch.int32)
    jobs[:, 0] = target.code
    jobs[:, 1] = 2 * count * units + first * target_units
    jobs[:, 4], jobs[:, 6] = 2 * first * units, (2 * first + 1) * units
    return arena, jobs, count * (2 * shape.tile_stride(NATIVE) + shape.tile_stride(target))


def _by_name() -> dict[str, KVFormat]:
    return {kv_format.name: kv_format for kv_format in FORMATS}


def _ms(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(value * 1e3, 4) for name, value in seconds.items()}
