"""Which layers of a model share an arena and block tables. No torch."""

from __future__ import annotations

from collections import defaultdict

from engine.memory_model import GroupSpec
from engine.models.config import ModelConfig
from kernels.layout import NATIVE, KVShape


def layer_groups(config: ModelConfig, element_bytes: int, protect_layers: int = 0) -> list[GroupSpec]:
    """Layers of equal attention window share an arena and block tables, the protected first ones apart.

    A window as long as the longest context never hides anything, so it counts as full attention.
    """
    layers: dict[tuple[int | None, bool], list[int]] = defaultdict(list)
    for layer, window in enumerate(config.windows):
        hides = window is not None and window < config.max_model_len
        layers[window if hides else None, layer < protect_layers].append(layer)
    return [
        GroupSpec(
            name=("protected-" if is_protected else "") + ("full" if window is None else f"window{window}"),
            layers=tuple(members),
            shape=KVShape(len(members), config.num_kv_heads, config.head_dim, element_bytes),
            window=window,
            lossiest=NATIVE.name if is_protected else None,
        )
        for (window, is_protected), members in layers.items()
    ]
