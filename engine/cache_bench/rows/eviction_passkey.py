"""Passkeys that survive eviction to a quarter of the prompt, over those that native answers, at every block size.

Prompts of 1,100 tokens of which 256 and the 16 sinks are kept, a quarter. The worst block size counts for heavy_hitter,
and the best one for window, which must fail: the number is asked for, but is not recent.
"""

from __future__ import annotations

import random

from engine.cache_bench.context import Context
from engine.cache_bench.inputs import first_token, held_out_ids, tokenizer_of
from engine.quality.compare import NATIVE, compare
from engine.quality.probes import RETRIEVES, passkeys
from engine.quality.scoring import Conditions
from engine.quality.settings import Values, evictions
from engine.tunables import TUNABLES

KEYS = (
    "heavy_hitter_passkey_ratio",
    "heavy_hitter_passkey_ratio_by_block_size",
    "window_passkey_ratio",
    "window_passkey_ratio_by_block_size",
)

_TOKENS, _KEPT, _COUNT = 1100, 256, 128


def run(context: Context) -> dict[str, object]:
    filler = held_out_ids(context)
    count = _COUNT // 8 if context.quick else _COUNT
    rng = random.Random(context.seed + 1)
    samples = passkeys(tokenizer_of(context), filler, _TOKENS, count, rng, first_token(context))
    sizes = [int(size) for size in TUNABLES["block_size"].values]
    offered = [name for name in ("heavy_hitter", "window") if name in evictions()]
    settings: dict[str, Values] = {
        f"{name} {size}": {"eviction": name, "keep_tokens": _KEPT, "block_size": size}
        for name in offered
        for size in sizes
    }
    outcomes = compare(context.load(), settings, samples, conditions=Conditions(chunk_tokens=256))
    shares = {name: outcome.tally.share_right for name, outcome in outcomes.items()}
    context.log(f"  {count} passkeys: " + ", ".join(f"{name} {share:.1%}" for name, share in shares.items()))
    if shares[NATIVE] < RETRIEVES:
        context.skip(f"void: this model answers {shares[NATIVE]:.0%} of {count} with the native cache")
    result: dict[str, object] = {}
    for name, worst in (("heavy_hitter", min), ("window", max)):
        ratios = {str(size): shares[f"{name} {size}"] / shares[NATIVE] for size in sizes} if name in offered else None
        result[f"{name}_passkey_ratio"] = None if ratios is None else worst(ratios.values())
        result[f"{name}_passkey_ratio_by_block_size"] = ratios
    return result
