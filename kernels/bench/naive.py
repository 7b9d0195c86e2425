"""The naive cache's three hot spots beside the paged cache: growth, concatenation, scattered access.

The naive cache keeps a tensor per sequence, [kv_heads, tokens, head_dim] for keys and for values. *Growth*: when it is
full, a tensor of twice the room is allocated and all is copied; the cost comes at once, to whoever runs then.
*Concatenation*: each new token makes a new tensor of everything, as `torch.cat` in a decode loop does. *Scattered
access*: tokens that were kept out of order are gathered by index before attention can read them. Paged, a new token is
written where it belongs, a block is taken from a free list, and attention reads blocks wherever they lie.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels import ops
from kernels.bench.measure import Case, interleaved, paged_cache
from kernels.layout import NATIVE


def hot_spots(case: Case, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """Milliseconds for one sequence and one layer at a context of ``case.tokens``; ``case.sequences`` must be 1."""
    generator = torch.Generator().manual_seed(3)
    size = (2, case.kv_heads, case.tokens, case.head_dim)
    cache = torch.randn(size, generator=generator).to(dtype)
    token = torch.randn((2, case.kv_heads, 1, case.head_dim), generator=generator).to(dtype)
    order = torch.randperm(case.tokens, generator=generator)
    query = torch.randn((1, case.heads, case.head_dim), generator=generator).to(dtype)
    arena, table = paged_cache(case, NATIVE, dtype, generator)
    # The slot of the last token: its block, and its place there.
    slots = table.entries[:, -1, :2].clone()
    slots[0, 1] = (case.tokens - 1) % case.block_size
    key, value = token[0].transpose(0, 1), token[1].transpose(0, 1)

    def growth() -> torch.Tensor:
        grown = torch.empty((2, case.kv_heads, 2 * case.tokens, case.head_dim), dtype=dtype)
        grown[:, :, : case.tokens] = cache
        return grown

    def scattered() -> torch.Tensor:
        keys, values = cache[0][None, :, order], cache[1][None, :, order]
        return scaled_dot_product_attention(query[:, :, None], keys, values, enable_gqa=True)

    seconds = interleaved(
        {
            "naive_growth": growth,
            "naive_concatenation": lambda: torch.cat((cache, token), dim=2),
            "paged_write": partial(ops.write_kv, arena, case.shape(dtype), 0, key, value, slots),
            "naive_scattered": scattered,
            "paged_attention": partial(
                ops.decode_attention, query, arena, case.shape(dtype), 0, table,
                scale=case.scale, out=torch.empty_like(query),
            ),
        },
        rounds,
    )  # fmt: skip
    return {"row": "naive", "case": str(case), "ms": {name: round(value * 1e3, 4) for name, value in seconds.items()}}
