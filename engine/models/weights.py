"""The tensors of a decoder: what they are called in a checkpoint, and how they lie fused in memory.

Query, key and value projections are one matrix, gate and up projections another: one product each per layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.config import ModelConfig


@dataclass
class LayerWeights:
    """One layer. Matrices are [outputs, inputs]; absent biases and norms are None."""

    input_norm: Tensor  # [hidden]
    qkv: Tensor  # [query + key + value, hidden]
    qkv_bias: Tensor | None
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim]: the query norm repeated, then the key norm
    output: Tensor  # [hidden, query]
    output_bias: Tensor | None
    post_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden]
    gate_up_bias: Tensor | None
    down: Tensor  # [hidden, intermediate]
    down_bias: Tensor | None


@dataclass
class DecoderWeights:
    """The whole model. ``head`` is the same tensor as ``embedding`` where the two are tied."""

    embedding: Tensor  # [vocab, hidden]
    layers: list[LayerWeights]
    final_norm: Tensor  # [hidden]
    head: Tensor  # [vocab, hidden]


def allocate(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> DecoderWeights:
    """Uninitialised weights of the right shapes; fill them through :func:`destinations`."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, device=device, dtype=dtype)

    fused = config.query_size + 2 * config.kv_size
    layers = [
        LayerWeights(
            input_norm=empty(config.hidden_size),
            qkv=empty(fused, config.hidden_size),
            qkv_bias=empty(fused) if config.qkv_bias else None,
            qk_norm=empty(config.num_heads + config.num_kv_heads, config.head_dim) if config.qk_norm else None,
            output=empty(config.hidden_size, config.query_size),
            output_bias=empty(config.hidden_size) if config.output_bias else None,
            post_norm=empty(config.hidden_size),
            gate_up=empty(2 * config.intermediate_size, config.hidden_size),
            gate_up_bias=empty(2 * config.intermediate_size) if config.mlp_bias else None,
            down=empty(config.hidden_size, config.intermediate_size),
            down_bias=empty(config.hidden_size) if config.mlp_bias else None,
        )
        for _ in range(config.num_layers)
    ]
    embedding = empty(config.vocab_size, config.hidden_size)
    head = embedding if config.tie_word_embeddings else empty(config.vocab_size, config.hidden_size)
    return DecoderWeights(embedding, layers, empty(config.hidden_size), head)


def destinations(config: ModelConfig, weights: DecoderWeights) -> Iterator[tuple[str, Tensor, tuple[int, ...]]]:
    """(checkpoint name, where it goes, shape in the checkpoint) of every tensor; copying broadcasts."""
    yield "model.embed_tokens.weight", weights.embedding, tuple(weights.embedding.shape)
    for index, layer in enumerate(weights.layers):
        for name, target in _layer_destinations(config, layer):
            shape = (config.head_dim,) if name.endswith(("q_norm.weight", "k_norm.weight")) else tuple(target.shape)
            yield f"model.layers.{index}.{name}", target, shape
    yield "model.norm.weight", weights.final_norm, tuple(weights.final_norm.shape)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", weights.head, tuple(weights.head.shape)


def _layer_destinations(config: ModelConfig, layer: LayerWeights) -> Iterator[tuple[str, Tensor]]:
    yield "input_layernorm.weight", layer.input_norm
    yield "post_attention_layernorm.weight", layer.post_norm
    projections = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    sizes = [config.query_size, config.kv_size, config.kv_size]
    yield from _fused(projections, sizes, layer.qkv, layer.qkv_bias)
    yield from _fused(("self_attn.o_proj",), [config.hidden_size], layer.output, layer.output_bias)
    yield from _fused(
        ("mlp.gate_proj", "mlp.up_proj"), [config.intermediate_size] * 2, layer.gate_up, layer.gate_up_bias
    )
    yield from _fused(("mlp.down_proj",), [config.hidden_size], layer.down, layer.down_bias)
    if layer.qk_norm is not None:
        yield "self_attn.q_norm.weight", layer.qk_norm[: config.num_heads]
        yield "self_attn.k_norm.weight", layer.qk_norm[config.num_heads :]


def _fused(
    names: tuple[str, ...], sizes: list[int], matrix: Tensor, bias: Tensor | None
) -> Iterator[tuple[str, Tensor]]:
    """The rows of a fused projection that each named one fills."""
    start = 0
    for name, rows in zip(names, sizes, strict=True):
        yield f"{name}.weight", matrix[start : start + rows]
        if bias is not None:
            yield f"{name}.bias", bias[start : start + rows]
        start += rows
