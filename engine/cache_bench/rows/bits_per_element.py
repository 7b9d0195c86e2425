"""Bits that one number of the KV cache takes in each format."""

from __future__ import annotations

from engine.cache_bench.context import Context
from engine.formats import FORMATS
from engine.quality.settings import bits_per_element

KEYS = ("bits_per_element",)


def run(context: Context) -> dict[str, object]:
    groups = context.load().groups
    return {"bits_per_element": {kind.name: bits_per_element(groups, kind) for kind in FORMATS}}
