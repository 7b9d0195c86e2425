"""What the quality rows share: the tokenizer, the held-out text as tokens, and how results are put."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tokenizers import Tokenizer

from engine.cache_bench.context import Context
from engine.quality.compare import Outcome
from engine.quality.tally import Figures
from engine.quality.texts import read_text
from engine.tokenizer import ModelTokenizer


def tokenizer_of(context: Context) -> Tokenizer:
    """Skips the row for a model without a fast tokenizer."""
    path = context.model / "tokenizer.json"
    if not path.is_file():
        context.skip(f"{context.model} holds no tokenizer.json")
    return Tokenizer.from_file(str(path))


def first_token(context: Context) -> int | None:
    """The model's beginning-of-sequence token, where it has one."""
    return ModelTokenizer(context.model).bos_token_id


def held_out_ids(context: Context) -> list[int]:
    """The held-out text as token ids; skips the row without texts."""
    name, text = read_text(context.need_text())
    ids: list[int] = tokenizer_of(context).encode(text, add_special_tokens=False).ids
    context.log(f"  text {name}: {len(ids)} tokens")
    return ids


def figures_of(outcome: Outcome, first: int = 0, stop: int | None = None) -> Figures:
    """Figures of parts ``first`` to ``stop``. Raises ValueError where nothing was judged."""
    found = outcome.tally.figures(first, stop)
    if found is None:
        raise ValueError("nothing was judged in these positions")
    return found


def log_all(context: Context, outcomes: Mapping[str, Outcome], first: int = 0) -> None:
    """A line per setting, with everything that is known."""
    for name, outcome in outcomes.items():
        found = figures_of(outcome, first)
        context.log(
            f"  {name}: {found.tokens} tokens, perplexity {found.perplexity:.3f} ({found.increase_pct:+.3f} % +- "
            f"{found.increase_error_pct:.3f}), KL {found.kl:.2e}, top-1 {found.top1:.4f}"
        )


def standard_error(share: float, count: int) -> float:
    """Of a share of ``count`` independent trials."""
    return math.sqrt(share * (1 - share) / count)
