"""Which settings are compared, and what each stores. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.formats import FORMATS, NATIVE, KVFormat
from engine.memory_model import GroupSpec, token_bytes
from engine.tunables import TUNABLES, TunableValue

Values = Mapping[str, TunableValue]


def format_settings() -> dict[str, Values]:
    """Every format but native, by name."""
    return {kind.name: {"kv_format": kind.name} for kind in FORMATS if not kind.is_native}


def evictions() -> list[str]:
    """The ways of evicting that the engine offers."""
    return [str(value) for value in TUNABLES["eviction"].values if value != "none"]


def eviction_settings(prompt_tokens: int) -> dict[str, Values]:
    """Every eviction with every number of kept tokens that drops a quarter of such a prompt or more."""
    kept = [keep for keep in map(int, TUNABLES["keep_tokens"].values) if keep <= prompt_tokens * 3 // 4]
    return {f"{name} {keep}": {"eviction": name, "keep_tokens": keep} for name in evictions() for keep in kept}


def bits_per_element(groups: Sequence[GroupSpec], kv_format: KVFormat = NATIVE) -> float:
    """Bits that one number of keys and values takes: codes, scales, zero points and padding of tiles, all included."""
    numbers = sum(2 * group.shape.num_layers * group.shape.num_kv_heads * group.shape.head_dim for group in groups)
    return 8 * sum(token_bytes(group.shape, kv_format) for group in groups) / numbers
