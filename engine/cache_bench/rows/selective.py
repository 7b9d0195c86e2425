"""Native perplexity over that of a cache that keeps 512 of 2,048 tokens, on the 128 tokens that follow.

Held-out text; the prompt is read natively, evicted, and what follows is forced token by token. Window eviction beside
it: running text mostly needs its nearest past.
"""

from __future__ import annotations

from engine.cache_bench.context import Context
from engine.cache_bench.inputs import figures_of, first_token, held_out_ids, log_all
from engine.quality.compare import NATIVE, compare
from engine.quality.samples import Sample, windows
from engine.quality.scoring import Conditions
from engine.quality.settings import Values, evictions

KEYS = ("selective_quality_ratio", "window_quality_ratio")

_PROMPT, _FORCED, _KEPT, _WINDOWS = 2048, 128, 512, 48


def run(context: Context) -> dict[str, object]:
    pieces = windows(
        held_out_ids(context), _PROMPT + _FORCED, _WINDOWS // (12 if context.quick else 1), first_token(context)
    )
    if not pieces or context.load().config.max_model_len < _PROMPT + _FORCED:
        context.skip(f"needs text and a model of {_PROMPT + _FORCED} tokens")
    samples = [Sample(tuple(piece), prompt=_PROMPT, score_from=_PROMPT) for piece in pieces]
    settings: dict[str, Values] = {name: {"eviction": name, "keep_tokens": _KEPT} for name in evictions()}
    outcomes = compare(context.load(), settings, samples, conditions=Conditions(chunk_tokens=256))
    log_all(context, outcomes)
    native = figures_of(outcomes[NATIVE]).perplexity
    ratios = {name: native / figures_of(outcome).perplexity for name, outcome in outcomes.items()}
    return {"selective_quality_ratio": ratios.get("heavy_hitter"), "window_quality_ratio": ratios.get("window")}
