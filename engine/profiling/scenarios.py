"""What is run to take an engine's measure: a few dozen small loads that vary one thing at a time. Stdlib only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine.formats import FORMATS, NATIVE


@dataclass(frozen=True)
class Scenario:
    """``batch`` prompts of ``context`` tokens, prefilled in steps of ``budget`` tokens, then decoded for a few steps.

    KV is stored in one format and block size from the start, so that decoding attends it so. ``then``: a tunable that
    changes at last, so that what is resident is converted. ``every``: instead, prompts of about ``context`` tokens come
    every so many steps on average and end after about ``output`` tokens, as in a served load: steps are then over ever
    other sequences, and prompts are short and mixed with decoding.
    """

    batch: int
    context: int
    budget: int = 512
    kv_format: str = NATIVE.name
    block_size: int = 16
    then: tuple[str, str | int] | None = None
    every: int = 0
    output: int = 0

    @property
    def tokens(self) -> int:
        return self.batch * self.context


# (sequences, context): decoding from one short sequence to many, and to a few long ones.
_DECODES = (
    (1, 32),
    (2, 512),
    (4, 32),
    (8, 256),
    (16, 32),
    (16, 768),
    (32, 128),
    (48, 32),
    (48, 512),
    (1, 3072),
    (4, 2048),
)
_QUICK_DECODES = ((1, 32), (8, 256), (32, 128), (4, 1024))
_STORED = ((1, 1024), (8, 768), (32, 384), (2, 2048))
_BUDGETS = (64, 128, 256, 1024, 2048)


# (prompts, tokens of each, steps between them, tokens of output): on average. The last: long prompts and short answers,
# as from an editor, so that steps with several chunks also end requests.
_ARRIVALS = (
    (40, 24, 3, 16),
    (40, 80, 2, 24),
    (32, 200, 5, 24),
    (12, 400, 8, 20),
    (8, 600, 4, 40),
    (32, 250, 1, 2),
)
_QUICK_ARRIVALS = _ARRIVALS[1:3]

# Format and block size, and what changes: every conversion that the loads above do not bring.
_SWITCHES = (
    ("int8", 32, ("kv_format", "int4")),
    ("native", 16, ("block_size", 64)),
    ("int8", 32, ("kv_format", "k8v4")),
    ("k8v4", 32, ("kv_format", "int4")),
    ("int8", 32, ("block_size", 128)),
    ("k8v4", 32, ("block_size", 128)),
    ("int4", 32, ("block_size", 128)),
)


def scenarios(*, pool_tokens: int, max_model_len: int, max_tokens: int, quick: bool = False) -> list[Scenario]:
    """Those that fit the pool and the model, of at most ``max_tokens`` prompt tokens each, cheapest first."""
    found = [
        s for s in _all(quick=quick) if s.tokens <= min(max_tokens, pool_tokens) and s.context < max_model_len - 64
    ]
    return sorted(
        set(found), key=lambda s: (s.tokens, s.batch, s.budget, s.kv_format, s.block_size, str(s.then), s.every)
    )


def _all(*, quick: bool) -> Iterator[Scenario]:
    for batch, context in _QUICK_DECODES if quick else _DECODES:
        yield Scenario(batch, context)
    for batch, context in _STORED[:2] if quick else _STORED:
        for kind in FORMATS[1:]:
            yield Scenario(batch, context, kv_format=kind.name, block_size=64)
        for block_size in (64, 256):
            yield Scenario(batch, context, block_size=block_size)
    for budget in _BUDGETS[1::2] if quick else _BUDGETS:
        yield Scenario(1, 1024 if quick else 2048, budget)
        yield Scenario(12, 100, budget)
    for batch, context, every, output in _QUICK_ARRIVALS if quick else _ARRIVALS:
        yield Scenario(batch, context, every=every, output=output)
    for kv_format, block_size, then in _SWITCHES[:2] if quick else _SWITCHES:
        yield Scenario(2, 512, kv_format=kv_format, block_size=block_size, then=then)
