"""Qwen3 (dense): query and key heads are RMS-normed before rotation; no biases unless asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.models.config import ConfigReader, ModelConfig, parse_common
from engine.models.qwen2 import qwen_windows

ARCHITECTURE = "Qwen3ForCausalLM"


def parse(raw: Mapping[str, Any]) -> ModelConfig:
    """Read a Qwen3 ``config.json``. Raises EngineError naming the key at fault."""
    attention_bias = ConfigReader(raw).flag("attention_bias")
    return parse_common(
        raw,
        architecture=ARCHITECTURE,
        default_kv_heads=32,
        default_head_dim=128,
        windows=qwen_windows(raw),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=True,
    )
