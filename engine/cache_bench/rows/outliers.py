"""Top-1 agreement with the native cache on a twin of the model with key outliers: rotary channel pairs times 1 to 50.

Held-out text in chunks of 32, everything older than 64 tokens recoded before the next, positions from 1,024 on.
"""

from __future__ import annotations

from engine.cache_bench.context import Context
from engine.cache_bench.inputs import figures_of, first_token, held_out_ids, log_all
from engine.quality.compare import NATIVE, compare
from engine.quality.outliers import outlier_twin
from engine.quality.samples import Sample, windows
from engine.quality.settings import format_settings

KEYS = ("outlier_twin_top1", "outlier_twin_perplexity_increase_pct")

_TOKENS, _JUDGED_FROM, _WINDOWS = 2048, 1024, 16


def run(context: Context) -> dict[str, object]:
    pieces = windows(held_out_ids(context), _TOKENS, _WINDOWS // (8 if context.quick else 1), first_token(context))
    if not pieces or context.load().config.max_model_len < _TOKENS:
        context.skip(f"needs text and a model of {_TOKENS} tokens")
    samples = [Sample(tuple(piece), prompt=_TOKENS, score_from=_JUDGED_FROM) for piece in pieces]
    twin = outlier_twin(context.load(), seed=context.seed)
    outcomes = compare(twin, format_settings(), samples)
    log_all(context, outcomes)
    found = {name: figures_of(outcome) for name, outcome in outcomes.items() if name != NATIVE}
    return {
        "outlier_twin_top1": {name: figures.top1 for name, figures in found.items()},
        "outlier_twin_perplexity_increase_pct": {name: figures.increase_pct for name, figures in found.items()},
    }
