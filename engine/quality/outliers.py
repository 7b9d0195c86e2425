"""A twin of a model whose keys have outlier channels and whose function is the same.

A rotary pair of channels (d, d + head_dim / 2) turns as one vector, so it may be scaled in the key if the query's is
divided by the same: their product, and everything after it, stays. Trained models have such channels (KIVI, Liu et al.
2024), which is what a format of few bits has to live with.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from engine.loader import LoadedModel
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.weights import LayerWeights


def outlier_twin(loaded: LoadedModel, *, largest: float = 50.0, seed: int = 0) -> LoadedModel:
    """Every pair of key channels of every KV head times 1 to ``largest`` (log-uniform), its queries divided.

    Weights that stay the same are shared. In 16-bit weights each product is rounded anew, so that the function is the
    same to that precision only.
    """
    model = loaded.model
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for layer in model.weights.layers:
        pairs = torch.rand((model.config.num_kv_heads, model.config.head_dim // 2), generator=generator)
        factor = torch.exp(pairs * math.log(largest)).repeat(1, 2)  # [kv_heads, head_dim]
        layers.append(_scaled(layer, model.config, factor.to(model.device)))
    return replace(loaded, model=Decoder(model.config, replace(model.weights, layers=layers)))


def _scaled(layer: LayerWeights, config: ModelConfig, factor: Tensor) -> LayerWeights:
    per_query_head = factor.repeat_interleave(config.num_heads // config.num_kv_heads, dim=0)
    both = torch.cat((1 / per_query_head, factor))  # [heads + kv_heads, head_dim]
    if layer.qk_norm is not None:  # whatever the projection scales, the norm after it takes back
        return replace(layer, qk_norm=(layer.qk_norm.float() * both).to(layer.qk_norm.dtype))
    rows = both.numel()

    def scaled(tensor: Tensor) -> Tensor:
        result = tensor.clone()
        head = result[:rows].float() * both.flatten().view(-1, *[1] * (tensor.dim() - 1))
        result[:rows] = head.to(tensor.dtype)
        return result

    bias = None if layer.qkv_bias is None else scaled(layer.qkv_bias)
    return replace(layer, qkv=scaled(layer.qkv), qkv_bias=bias)
