"""The decoder that all families share: a flat batch of tokens in, hidden states out; attention is handed in."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from torch.nn import functional

from engine.models.config import ModelConfig
from engine.models.rope import RotaryTable, rotate
from engine.models.weights import DecoderWeights, LayerWeights


class Attention(Protocol):
    """Stores this step's keys and values of one layer and attends over everything stored."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Query [tokens, heads, head_dim], key and value [tokens, kv_heads, head_dim], all rotated; returns the output
        [tokens, heads, head_dim], contiguous. Query, key and value may be strided views.
        """
        ...


class Decoder:
    """Weights and the arithmetic on them. Nothing here knows of requests or of how KV is stored.

    ``products``: whose products of matrices they are, ``torch``'s or those with ``packed`` ones.
    """

    products = "torch"

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        self.config = config
        self.weights = weights
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self._rotary = RotaryTable(config.rope, config.head_dim, self.device, self.dtype)

    def hidden(self, ids: Tensor, positions: Tensor, end: int, attention: Attention) -> Tensor:
        """Hidden states [tokens, hidden] before the final norm, of int32 or int64 ``ids`` [tokens] at ``positions``.

        ``end``: one more than the largest position, known on the host so that nothing waits for the device.
        """
        hidden = functional.embedding(ids, self.weights.embedding)
        cos, sin = self._rotary.at(positions, end)
        for index, layer in enumerate(self.weights.layers):
            normed = self._norm(hidden, layer.input_norm)
            hidden.add_(self._attend(index, layer, normed, cos, sin, attention))
            normed = self._norm(hidden, layer.post_norm)
            hidden.add_(_feed_forward(layer, normed))
        return hidden

    def warm_up(self) -> None:
        """Compile what would otherwise be compiled at first use."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [rows, vocab] of hidden states [rows, hidden]."""
        return functional.linear(self._norm(hidden, self.weights.final_norm), self.weights.head).float()

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)

    def _attend(
        self, index: int, layer: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention
    ) -> Tensor:
        config = self.config
        fused = functional.linear(x, layer.qkv, layer.qkv_bias)
        heads = fused.view(x.shape[0], config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        rotating = config.num_heads + config.num_kv_heads
        query_key = heads[:, :rotating]
        if layer.qk_norm is not None:
            query_key = functional.rms_norm(query_key, (config.head_dim,), None, config.rms_norm_eps) * layer.qk_norm
        query_key = rotate(query_key, cos, sin)
        attended = attention(
            index, query_key[:, : config.num_heads], query_key[:, config.num_heads :], heads[:, rotating:]
        )
        return functional.linear(attended.view(x.shape[0], config.query_size), layer.output, layer.output_bias)


def _feed_forward(layer: LayerWeights, x: Tensor) -> Tensor:
    gate, up = functional.linear(x, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
    return functional.linear(functional.silu(gate).mul_(up), layer.down, layer.down_bias)
