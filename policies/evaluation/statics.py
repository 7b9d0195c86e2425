"""Settings that never change: what a person could have chosen at start-up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from typing import Final

import numpy as np

from engine.tunables import TUNABLES, TunableValue

Values = Mapping[str, TunableValue]
OfferedCheck = Callable[[Values], bool]

GRID_KNOBS: Final = ("kv_format", "block_size", "eviction", "host_offload")

# What the grid usually comes down to: formats, the block sizes that suit them, eviction at both ends, and the step's
# budget of tokens, which a person would set before any of them.
_FEW: Final[tuple[Values, ...]] = (
    {},
    {"block_size": 32},
    {"block_size": 128},
    {"kv_format": "int8", "block_size": 32},
    {"kv_format": "int8", "block_size": 128},
    {"kv_format": "k8v4", "block_size": 32},
    {"kv_format": "int4", "block_size": 32},
    {"kv_format": "int4", "block_size": 128},
    {"eviction": "window", "keep_tokens": 1024},
    {"eviction": "heavy_hitter", "keep_tokens": 1024},
    {"kv_format": "int8", "eviction": "window", "keep_tokens": 1024},
    {"host_offload": "on"},
    {"kv_format": "int8", "host_offload": "on"},
    {"max_num_batched_tokens": 256},
    {"max_num_batched_tokens": 1024},
    {"kv_format": "int8", "block_size": 32, "max_num_batched_tokens": 256},
)


def few(offered: OfferedCheck) -> list[Values]:
    """A declared subset of the grid."""
    return [values for values in _FEW if offered(values)]


def grid(offered: OfferedCheck) -> list[Values]:
    """Every setting of format, block size, eviction and offload that the engine offers.

    Quantised blocks of 16 tokens are blocks of 32, so that pair is one setting and not two.
    """
    result: list[Values] = []
    for chosen in product(*(TUNABLES[knob].values for knob in GRID_KNOBS)):
        values = {
            knob: value for knob, value in zip(GRID_KNOBS, chosen, strict=True) if value != TUNABLES[knob].default
        }
        if "kv_format" in values and "block_size" not in values:
            continue
        if offered(values):
            result.append(values)
    return result


def random_settings(number: int, seed: int, offered: OfferedCheck) -> list[Values]:
    """Settings drawn over all knobs: what searching without knowing anything gives."""
    rng, result = np.random.default_rng(seed), list[Values]()
    for _ in range(100 * number):
        if len(result) == number:
            break
        values = {name: knob.values[int(rng.integers(len(knob.values)))] for name, knob in TUNABLES.items()}
        if offered(values) and values not in result:
            result.append(values)
    return result
