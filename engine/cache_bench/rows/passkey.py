"""Passkeys of 1,024 tokens that a model answers whole under each format; void where it misses many of them natively."""

from __future__ import annotations

import random

from engine.cache_bench.context import Context
from engine.cache_bench.inputs import first_token, held_out_ids, standard_error, tokenizer_of
from engine.quality.compare import NATIVE, compare
from engine.quality.probes import RETRIEVES, passkeys
from engine.quality.scoring import Conditions
from engine.quality.settings import format_settings

KEYS = ("passkey_accuracy",)

_TOKENS, _COUNT = 1024, 512


def run(context: Context) -> dict[str, object]:
    filler = held_out_ids(context)
    count = _COUNT // 16 if context.quick else _COUNT
    rng = random.Random(context.seed)
    samples = passkeys(tokenizer_of(context), filler, _TOKENS, count, rng, first_token(context))
    outcomes = compare(context.load(), format_settings(), samples, conditions=Conditions(chunk_tokens=256))
    shares = {name: outcome.tally.share_right for name, outcome in outcomes.items()}
    for name, share in shares.items():
        context.log(f"  {name}: {share:.2%} +- {standard_error(share, count):.2%} of {count}")
    if shares[NATIVE] < RETRIEVES:
        context.skip(f"void: this model answers {shares[NATIVE]:.0%} of {count} with the native cache")
    return {"passkey_accuracy": {**shares, "n": count}}
