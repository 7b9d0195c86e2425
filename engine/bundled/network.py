"""The bundled model as a trainable network: Llama architecture, Hugging Face parameter names.

Only training uses this file; the engine runs the saved folder through its own decoder.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class NetworkConfig:
    """Sizes of the network, named as in a Hugging Face ``config.json``."""

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 704
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 4096

    def to_hugging_face(self, bos: int, eos: int, pad: int) -> dict[str, Any]:
        """The ``config.json`` of this network."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **asdict(self),
            # Trained to 2,048. Stretching the slow rotations, without training, keeps perplexity level to 4,096 and
            # changes nothing to speak of below: README.md.
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 2.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 2048,
            },
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "bos_token_id": bos,
            "eos_token_id": eos,
            "pad_token_id": pad,
        }


def rotary_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine, each [positions, head_dim], halves repeated (the Hugging Face convention)."""
    inverse = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = positions[:, None].float() * inverse[None]
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to x [..., tokens, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q = self.q_proj(x).view(batch, tokens, self.heads, self.dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, tokens, self.kv_heads, self.dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, tokens, self.kv_heads, self.dim).transpose(1, 2)
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        group = self.heads // self.kv_heads
        out = functional.scaled_dot_product_attention(
            q,
            k.repeat_interleave(group, 1),
            v.repeat_interleave(group, 1),
            is_causal=True,
        )
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, tokens, self.heads * self.dim))
        return projected


class GatedMlp(nn.Module):
    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return projected


class Layer(nn.Module):
    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = GatedMlp(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """The part that Hugging Face names ``model``."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class Network(nn.Module):
    """Ids [batch, tokens] to float32 logits [batch, tokens, vocab]."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        cos, sin = rotary_tables(positions, self.config.head_dim, self.config.rope_theta)
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        logits: Tensor = self.lm_head(self.model.norm(x))
        return logits.float()
