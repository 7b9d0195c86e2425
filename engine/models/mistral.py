"""Mistral 7B and its kin: Llama's shape, every layer with a sliding window unless the file says null."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.models.config import ConfigReader, ModelConfig, parse_common

ARCHITECTURE = "MistralForCausalLM"


def parse(raw: Mapping[str, Any]) -> ModelConfig:
    """Read a Mistral ``config.json``. Raises EngineError naming the key at fault."""
    read = ConfigReader(raw)
    # An absent key means 4,096 (the configuration class's default), a null one means no window (since v0.2).
    window = None if raw.get("sliding_window", 4096) is None else read.integer("sliding_window", 4096)
    return parse_common(
        raw,
        architecture=ARCHITECTURE,
        default_kv_heads=8,
        default_head_dim=None,
        windows=(window,) * read.integer("num_hidden_layers"),
    )
