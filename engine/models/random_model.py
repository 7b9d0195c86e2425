"""Model folders of random weights in any supported shape: for tests, and for timing shapes without a download."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.models.registry import parse_config
from engine.models.weights import allocate, destinations


def write_random_model(
    folder: Path, raw_config: Mapping[str, Any], *, seed: int, deviation: float = 0.02, dtype: str = "float32"
) -> Path:
    """Write ``config.json`` and ``model.safetensors`` and return the folder (made if missing).

    Matrices are normal with the given deviation (embeddings five times that, so that logits tell tokens apart),
    norms near 1, biases small. The same seed gives the same bytes.
    """
    config = parse_config(raw_config)
    generator = torch.Generator().manual_seed(seed)
    torch_dtype = getattr(torch, dtype)
    tensors = {}
    shapes = destinations(config, allocate(config, torch.device("meta"), torch_dtype))
    for name, _, shape in shapes:
        noise = torch.randn(shape, generator=generator)
        if "norm" in name:
            tensor = 1.0 + 0.1 * noise
        elif name == "model.embed_tokens.weight":
            tensor = 5 * deviation * noise
        else:
            tensor = deviation * noise
        tensors[name] = tensor.to(torch_dtype)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**raw_config, "torch_dtype": dtype}, indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder
