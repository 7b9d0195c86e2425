"""Which layers of a model share an arena and block tables. No torch."""

from __future__ import annotations

from collections import defaultdict

from engine.memory_model import GroupSpec
from engine.models.config import ModelConfig
from kernels.layout import KVShape


def layer_groups(config: ModelConfig, element_bytes: int) -> list[GroupSpec]:
    """Layers of equal attention window share an arena and block tables.

    A window as long as the longest context never hides anything, so it counts as full attention.
    """
    layers: dict[int | None, list[int]] = defaultdict(list)
    for layer, window in enumerate(config.windows):
        layers[window if window is not None and window < config.max_model_len else None].append(layer)
    return [
        GroupSpec(
            name="full" if window is None else f"window{window}",
            layers=tuple(members),
            shape=KVShape(len(members), config.num_kv_heads, config.head_dim, element_bytes),
            window=window,
        )
        for window, members in layers.items()
    ]
