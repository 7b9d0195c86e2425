"""Other libraries' paged decode at the core points, native only, where they happen to be installed.

Their pages hold one layer's tokens head by head; same tokens, same bytes to read as ours.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from kernels.gpu_check.points import Point, Row, Scale, SkippedError
from kernels.gpu_check.timing import Clock


def peer_points(scale: Scale, clock: Clock, bandwidth: float) -> Iterator[Point]:
    """Points for FlashInfer and flash-attn; they raise SkippedError where the library refuses."""
    measures = {"flashinfer": _flashinfer, "flash_attn": _flash_attn}
    for library, measure in measures.items():
        if clock.device.type == "cuda" and importlib.util.find_spec(library) is not None:
            for size, tokens, batch in scale.core:
                # flash-attn takes pages of whole multiples of 256 tokens only.
                page = 256 if library == "flash_attn" else size
                key = f"peer {library} page {page} context {tokens} batch {batch}"
                yield Point(key, partial(_measured, measure, scale, clock, bandwidth, library, (page, tokens, batch)))


def _measured(
    measure: Any, scale: Scale, clock: Clock, bandwidth: float, library: str, place: tuple[int, int, int]
) -> Row:
    page, tokens, batch = place
    shape, pages = scale.shape, batch * tokens // page
    size = (pages, 2, page, shape.num_kv_heads, shape.head_dim)
    stored = torch.randn(size, device=clock.device, dtype=scale.dtype)
    table = torch.randperm(pages, device=clock.device, dtype=torch.int32).view(batch, -1)
    query = torch.randn((batch, shape.num_kv_heads * scale.group, shape.head_dim), device=clock.device).to(scale.dtype)
    try:
        micros = measure(importlib.import_module(library), clock, query, stored, table, tokens)
    except Exception as error:  # whatever a foreign library raises
        raise SkippedError(f"{type(error).__name__}: {str(error)[:200]}") from error
    gbps = stored.numel() * stored.element_size() / micros / 1e3
    return {
        "call": "peer", "library": library, "page": page, "context": tokens, "batch": batch,
        "us": round(micros, 2), "gbps": round(gbps, 1), "share_of_copy": round(gbps / bandwidth, 3),
    }  # fmt: skip


def _flashinfer(
    library: Any, clock: Clock, query: torch.Tensor, stored: torch.Tensor, table: torch.Tensor, tokens: int
) -> float:
    batch, per_sequence = table.shape
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=clock.device)
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    ends = torch.arange(batch + 1, dtype=torch.int32, device=clock.device) * per_sequence
    page = stored.shape[2]
    last = torch.full((batch,), (tokens - 1) % page + 1, dtype=torch.int32, device=clock.device)
    wrapper.plan(
        ends, table.reshape(-1), last, query.shape[1], stored.shape[3], query.shape[2], page,
        q_data_type=query.dtype, kv_data_type=stored.dtype,
    )  # fmt: skip
    return clock.micros(lambda: wrapper.run(query, stored))


def _flash_attn(
    library: Any, clock: Clock, query: torch.Tensor, stored: torch.Tensor, table: torch.Tensor, tokens: int
) -> float:
    keys, values = stored[:, 0].contiguous(), stored[:, 1].contiguous()
    lengths = torch.full((len(table),), tokens, dtype=torch.int32, device=clock.device)
    run = partial(
        library.flash_attn_with_kvcache, query[:, None], keys, values, cache_seqlens=lengths, block_table=table
    )
    return clock.micros(run)
