"""How long a step would take in which so many sessions decode: a profile's terms, or a data sheet's. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from engine.footprint import Blocks
from engine.memory_model import GroupSpec
from engine.step_counts import STEP_INDEX, STEP_TERMS
from envs.latency_model import LatencyModel


def decode_step_s(
    model: LatencyModel, groups: Sequence[GroupSpec], held: Sequence[Blocks], sessions: int, context: int
) -> float:
    """Seconds of a step in which ``sessions`` sequences that hold ``held`` each compute one token after ``context``."""
    counts = [0] * len(STEP_TERMS)
    counts[STEP_INDEX["step"]] = 1
    counts[STEP_INDEX["decode_sequence"]] = counts[STEP_INDEX["sample"]] = sessions
    counts[STEP_INDEX["token_beyond_knee"]] = max(0, sessions - model.knee_tokens)
    for group, blocks in zip(groups, held, strict=True):
        layers, attended = len(group.layers), min(context, group.window or context)
        total = sum(number * block_class.block_size for block_class, number in blocks.items())
        counts[STEP_INDEX["decode_block"]] += layers * sessions * sum(blocks.values())
        for block_class, number in blocks.items():
            share = number * block_class.block_size * attended // total  # the last block is not full
            counts[STEP_INDEX[f"decode_kv_{block_class.kv_format}"]] += layers * sessions * share
    return model.step_ns(counts) / 1e9
