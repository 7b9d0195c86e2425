"""Bits that one number of the KV cache takes in each format: codes, scales, zero points and padding, all included."""

from __future__ import annotations

from engine.cache_bench.context import Context
from engine.formats import FORMATS
from engine.memory_model import token_bytes

KEYS = ("bits_per_element",)


def run(context: Context) -> dict[str, object]:
    groups = context.load().groups
    numbers = sum(2 * group.shape.num_layers * group.shape.num_kv_heads * group.shape.head_dim for group in groups)
    bits = {kind.name: 8 * sum(token_bytes(group.shape, kind) for group in groups) / numbers for kind in FORMATS}
    return {"bits_per_element": bits}
