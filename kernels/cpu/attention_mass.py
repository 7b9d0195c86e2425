"""Share of attention of a prompt's last queries per chunk of positions, on the CPU: gathered keys, torch's products.

Done once per prompt. All that the products see is keys in position order, which no block size changes.
"""

from __future__ import annotations

import itertools

import torch

from kernels.cpu.gather import gather_heads, stored_positions
from kernels.layout import CHUNK_TOKENS, KVShape
from kernels.table import TableView

_SCORE_BYTES = 1 << 20  # of one slice of queries: bounds memory at long contexts, and stays in a core's cache


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
) -> None:
    """See :func:`kernels.ops.attention_mass`."""
    mass.zero_()
    firsts = table.query_first.tolist()
    chunks = mass.shape[2]
    for sequence, (start, stop) in enumerate(itertools.pairwise(query_starts.tolist())):
        count = int(table.num_entries[sequence])
        begin = max(start, stop - last)
        if begin == stop or count == 0:
            continue
        entries = table.entries[sequence, :count]
        first = firsts[sequence] + begin - start
        low = max(0, first - window + 1) if window > 0 else 0
        positions = stored_positions(entries, low)
        queries = query[begin:stop].to(torch.float32) * scale
        for head in range(shape.num_kv_heads):
            keys, _ = gather_heads(
                arena, shape, query.dtype, layer, range(head, head + 1), entries, low, len(positions), with_values=False
            )
            shares = _shares(queries, keys[0], head, shape.num_kv_heads, first, positions, window)
            spread = shares.new_zeros(chunks * CHUNK_TOKENS)
            covered = positions < len(spread)
            spread[positions[covered]] = shares[covered]
            mass[sequence, head] = spread.view(chunks, CHUNK_TOKENS).sum(dim=1)


def _shares(
    query: torch.Tensor,
    key: torch.Tensor,
    head: int,
    kv_heads: int,
    first: int,
    positions: torch.Tensor,
    window: int,
) -> torch.Tensor:
    """Share of attention per key [tokens, head_dim], averaged over scaled queries [n, heads, head_dim].

    The first query is at position ``first``, the keys are at ``positions``; float32 [tokens].
    """
    group = query.shape[1] // kv_heads
    rows = query[:, head * group : (head + 1) * group]
    shares = key.new_zeros(len(key))
    at_once = max(1, _SCORE_BYTES // (4 * group * max(1, len(key))))
    for start in range(0, len(rows), at_once):
        part = rows[start : start + at_once]
        distance = torch.arange(first + start, first + start + len(part))[:, None] - positions[None, :]
        hidden = (distance < 0) | (distance >= window) if window > 0 else distance < 0
        scores = torch.matmul(part.transpose(0, 1), key.T)
        weights = torch.softmax(scores.masked_fill_(hidden, -torch.inf), dim=-1)
        # A query that sees nothing has no share to give; its softmax is NaN.
        weights.masked_fill_(hidden.all(dim=-1)[None, :, None], 0)
        shares += weights.sum(dim=(0, 1))
    return shares / (group * len(rows))
