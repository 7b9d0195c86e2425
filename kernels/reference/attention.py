"""Dense masked attention of one sequence: what both attention references compute."""

from __future__ import annotations

import torch


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    scale: float,
    window: int,
) -> torch.Tensor:
    """Causal attention with grouped query heads, in the dtype of ``key``.

    query [queries, heads, head_dim], key and value [tokens, kv_heads, head_dim], positions int64. A query attends
    to positions p with query - window < p <= query (no lower bound if ``window`` is 0); zero if there are none.
    Returns [queries, heads, head_dim].
    """
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    distance = query_positions[:, None] - key_positions[None, :]
    hidden = distance < 0
    if window > 0:
        hidden |= distance >= window
    scores = torch.einsum("qhd,khd->hqk", query.to(key.dtype), key) * scale
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
    weights = weights.masked_fill(hidden.all(dim=-1)[None, :, None], 0)
    return torch.einsum("hqk,khd->qhd", weights, value)
