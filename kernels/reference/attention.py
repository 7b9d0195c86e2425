"""Dense masked attention of one sequence: what the attention references compute."""

from __future__ import annotations

import torch

from kernels.layout import CHUNK_TOKENS


def attention_weights(
    query: torch.Tensor,
    key: torch.Tensor,
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    scale: float,
    window: int,
) -> torch.Tensor:
    """Causal softmax weights with grouped query heads, in the dtype of ``key``.

    query [queries, heads, head_dim], key [tokens, kv_heads, head_dim], positions int64. A query attends to positions
    p with query - window < p <= query (no lower bound if ``window`` is 0); its weights are zero if there are none.
    Returns [heads, queries, tokens].
    """
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    distance = query_positions[:, None] - key_positions[None, :]
    hidden = distance < 0
    if window > 0:
        hidden |= distance >= window
    scores = torch.einsum("qhd,khd->hqk", query.to(key.dtype), key) * scale
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
    return weights.masked_fill(hidden.all(dim=-1)[None, :, None], 0)


def apply_weights(weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Weighted values [queries, heads, head_dim] of weights [heads, queries, tokens] over [tokens, kv_heads, dim]."""
    value = value.repeat_interleave(weights.shape[0] // value.shape[1], dim=1)
    return torch.einsum("hqk,khd->qhd", weights, value)


def chunk_mass(weights: torch.Tensor, key_positions: torch.Tensor, kv_heads: int, chunks: int) -> torch.Tensor:
    """Share of attention per chunk of 16 positions, averaged over queries and the heads of each KV head.

    weights [heads, queries, tokens]; returns [kv_heads, chunks], zero if there are no queries.
    """
    heads, queries, tokens = weights.shape
    mass = weights.new_zeros((kv_heads, chunks))
    if queries:
        shares = weights.reshape(kv_heads, heads // kv_heads * queries, tokens).mean(dim=1)
        # Keys that lie past the chunks lie past every query: nothing attends to them.
        covered = key_positions < chunks * CHUNK_TOKENS
        mass.index_add_(1, key_positions[covered] // CHUNK_TOKENS, shares[:, covered])
    return mass
