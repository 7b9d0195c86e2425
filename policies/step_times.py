"""Times of steps as functions of how many sequences decode: the latency model's terms, summed by settings. numpy only.

A step computes one token of each of ``n`` decoding sequences and, where prompts are under way, a chunk of what its
token budget leaves. Chunks come in two kinds: full ones, and the rest of a prompt that nobody follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_LEAST: Final = 1e-9


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Arrays by setting, in seconds. ``base``: of every step; ``each``: per decoding sequence; ``token``: per prompt
    token, ``chunk``: per chunk, whatever its length; ``beyond``: per token beyond ``knee``. ``budget``: tokens per
    step.
    """

    base: float
    each: Floats
    token: float
    chunk: Floats
    beyond: float
    knee: float
    budget: Floats

    def decode_s(self, n: Floats) -> Floats:
        """A step in which ``n`` sequences decode and no prompt is computed."""
        return self.base + self.each * n + self.beyond * np.maximum(0.0, n - self.knee)

    def prefill_s(self, n: Floats, tokens: Floats) -> Floats:
        """A step with a chunk of ``tokens`` besides."""
        above = np.maximum(0.0, n + tokens - self.knee)
        return self.base + self.each * n + self.chunk + self.token * tokens + self.beyond * above

    def balance(self, rate_rps: float, steps: float, busy_s: Floats, n: Floats) -> Floats:
        """How many decode when requests of ``steps`` tokens arrive at a rate and each takes ``busy_s`` of steps' time
        for its prompt; a very large number where that cannot be kept up. ``n``: a first guess, for the knee.
        """
        over = n > self.knee
        base = np.maximum(0.0, self.base - over * (self.beyond * self.knee))
        left = 1.0 - rate_rps * (busy_s + steps * (self.each + over * self.beyond))
        wanted: Floats = rate_rps * steps * base / np.maximum(left, _LEAST)
        return wanted


@dataclass(frozen=True, slots=True)
class Chunks:
    """How prompts are cut while ``n`` sequences decode, per request: ``full`` chunks of ``size`` tokens that take
    ``full_s`` each, and ``rest`` (0 to 1) smaller ones that take ``rest_s``. ``decode_s``: a step without any.
    """

    size: Floats
    full: Floats
    full_s: Floats
    rest: Floats
    rest_s: Floats
    decode_s: Floats

    @classmethod
    def of(cls, times: StepTimes, n: Floats, prompt_tokens: float, busy: Floats) -> Chunks:
        """``busy``: share of time that prompts are under way. The more, the likelier another one fills up the chunk."""
        size = np.maximum(1.0, times.budget - n)
        share = prompt_tokens / size
        full = np.maximum(0.0, share - 0.5 * (1.0 - busy))
        left = share - full  # of a full chunk
        rest = np.minimum(1.0, 2.0 * left)
        decodes_s = times.base + times.each * n
        with_chunk_s, above = decodes_s + times.chunk, n - times.knee
        full_s = with_chunk_s + times.token * size + times.beyond * np.maximum(0.0, above + size)
        rest_tokens = size * np.maximum(0.5, left)  # in one chunk, if there is one
        rest_s = with_chunk_s + times.token * rest_tokens + times.beyond * np.maximum(0.0, above + rest_tokens)
        return cls(size, full, full_s, rest, rest_s, decodes_s + times.beyond * np.maximum(0.0, above))

    @property
    def alone_s(self) -> Floats:
        """Time of the steps that compute a prompt."""
        return self.full * self.full_s + self.rest * self.rest_s

    @property
    def extra_s(self) -> Floats:
        """What a prompt adds to the time of steps that decode anyway."""
        return self.alone_s - (self.full + self.rest) * self.decode_s
