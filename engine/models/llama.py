"""Llama (2, 3, 3.1 to 3.3 and everything of that shape): optional biases, full attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.models.config import ConfigReader, ModelConfig, parse_common

ARCHITECTURE = "LlamaForCausalLM"


def parse(raw: Mapping[str, Any]) -> ModelConfig:
    """Read a Llama ``config.json``. Raises EngineError naming the key at fault."""
    read = ConfigReader(raw)
    attention_bias = read.flag("attention_bias")
    return parse_common(
        raw,
        architecture=ARCHITECTURE,
        default_kv_heads=None,
        default_head_dim=None,
        windows=(None,) * read.integer("num_hidden_layers"),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=read.flag("mlp_bias"),
    )
