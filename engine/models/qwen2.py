"""Qwen2 and Qwen2.5: biased query, key and value projections; upper layers may have a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.models.config import ConfigReader, ModelConfig, parse_common

ARCHITECTURE = "Qwen2ForCausalLM"


def parse(raw: Mapping[str, Any]) -> ModelConfig:
    """Read a Qwen2 ``config.json``. Raises EngineError naming the key at fault."""
    return parse_common(
        raw,
        architecture=ARCHITECTURE,
        default_kv_heads=32,
        default_head_dim=None,
        windows=qwen_windows(raw),
        qkv_bias=True,
    )


def qwen_windows(raw: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Attention window per layer: layers from ``max_window_layers`` on slide when ``use_sliding_window`` is true."""
    read = ConfigReader(raw)
    window = read.integer("sliding_window", 4096) if read.flag("use_sliding_window") else None
    return read.layer_windows(
        read.integer("num_hidden_layers"), window, read.integer("max_window_layers", 28, minimum=0)
    )
