"""Perplexity on the held-out text under each format, against native, and whether the loss grows along a sequence.

Text goes through the engine in chunks of 32 tokens; before the next chunk everything more than 64 tokens old is
recoded, in every layer, so a key is computed over what the format left of its past. Only positions from 1,024 on count.
The second part takes 4,096 tokens: int4's increase in the last quarter of the judged positions over that in the first.
Where the first increase is not twice its error, a ratio of observed increases says nothing; then it is the ratio of the
increases that native itself expects, exp(KL) - 1, which leave out the luck of which token came. ``estimator`` says
which. Rounding in 16 bits alone makes predictions differ by more than these formats do, at every position alike, and
could hide a rise; hence the same ratio in float32 beside it.
"""

from __future__ import annotations

import math

from engine.cache_bench.context import Context
from engine.cache_bench.inputs import figures_of, first_token, held_out_ids, log_all
from engine.quality.compare import NATIVE, compare
from engine.quality.samples import Sample, windows
from engine.quality.settings import Values, format_settings

_QUARTER_KEYS = (
    "perplexity_increase_pct_last_quarter_over_first",
    "perplexity_increase_pct_by_quarter",
    "expected_last_quarter_over_first_float32",
)
KEYS = ("perplexity_increase_pct", "perplexity_increase_pct_error", "perplexity_top1", *_QUARTER_KEYS)

_JUDGED_FROM = 1024
_SHORT, _SHORT_WINDOWS = 2048, 32
_LONG, _LONG_WINDOWS = 4096, 16
_INT4: dict[str, Values] = {"int4": {"kv_format": "int4"}}
_QUARTERS = (4, 7, 10, 13)  # first of three sixteenths each: positions 1,024 to 4,096


def run(context: Context) -> dict[str, object]:
    ids, bos, loaded = held_out_ids(context), first_token(context), context.load()
    scale = 8 if context.quick else 1
    pieces = windows(ids, _SHORT, _SHORT_WINDOWS // scale, bos)
    if not pieces:
        context.skip(f"the text has {len(ids)} tokens; {_SHORT} are needed")
    samples = [Sample(tuple(piece), prompt=_SHORT, score_from=_JUDGED_FROM) for piece in pieces]
    outcomes = compare(loaded, format_settings(), samples)
    log_all(context, outcomes)
    found = {name: figures_of(outcome) for name, outcome in outcomes.items() if name != NATIVE}
    return {
        "perplexity_increase_pct": {name: figures.increase_pct for name, figures in found.items()},
        "perplexity_increase_pct_error": {name: figures.increase_error_pct for name, figures in found.items()},
        "perplexity_top1": {name: figures.top1 for name, figures in found.items()},
        **_by_quarter(context, windows(ids, _LONG, _LONG_WINDOWS // scale, bos)),
    }


def _by_quarter(context: Context, pieces: list[list[int]]) -> dict[str, object]:
    loaded = context.load()
    if not pieces or loaded.config.max_model_len < _LONG:
        context.log(f"  no sequence of {_LONG} tokens: text or model is too short")
        return dict.fromkeys(_QUARTER_KEYS)
    samples = [Sample(tuple(piece), prompt=_LONG, score_from=_JUDGED_FROM) for piece in pieces]
    outcomes = compare(loaded, _INT4, samples, bins=16)
    quarters = [figures_of(outcomes["int4"], first, first + 3) for first in _QUARTERS]
    native = [figures_of(outcomes[NATIVE], first, first + 3) for first in _QUARTERS]
    for number, (one, plain) in enumerate(zip(quarters, native, strict=True)):
        context.log(
            f"  quarter {number + 1} of positions 1,024 to 4,096: native {plain.perplexity:.2f}, int4 "
            f"{one.increase_pct:+.3f} % +- {one.increase_error_pct:.3f}, KL {one.kl:.2e}, top-1 {one.top1:.4f}"
        )
    first, last = quarters[0], quarters[-1]
    is_clear = first.increase_pct > 2 * first.increase_error_pct
    grown = last.increase_pct / first.increase_pct if is_clear else math.expm1(last.kl) / math.expm1(first.kl)
    ratio = {"int4": grown, "estimator": "observed" if is_clear else "expected"}
    observed = {"int4": [figures.increase_pct for figures in quarters]}
    observed["int4_error"] = [figures.increase_error_pct for figures in quarters]
    observed["int4_expected"] = [100 * math.expm1(figures.kl) for figures in quarters]
    observed["native_perplexity"] = [figures.perplexity for figures in native]
    exact = compare(context.load("float32"), _INT4, samples[: len(samples) // 2 or 1], bins=16)["int4"]
    rises = [math.expm1(figures_of(exact, first, first + 3).kl) for first in _QUARTERS]
    context.log(
        f"  float32: int4's expected increase by quarter, %: {', '.join(f'{100 * rise:.4f}' for rise in rises)}"
    )
    return dict(zip(_QUARTER_KEYS, (ratio, observed, {"int4": rises[-1] / rises[0]}), strict=True))
