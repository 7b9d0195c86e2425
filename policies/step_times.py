"""Times of steps as functions of how many sequences decode: the latency model's terms, summed by settings. numpy only.

A step computes one token of each of ``n`` decoding sequences and, where prompts are under way, a chunk of what its
token budget leaves. Chunks come in two kinds: full ones, and the rest of a prompt that nobody follows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Arrays by setting, in seconds. ``base``: of every step; ``each``: per decoding sequence; ``token``: per prompt
    token, ``chunk``: per chunk, whatever its length; ``beyond``: per token beyond ``knee``. ``budget``: tokens per step.
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
        base, each = self.base, self.each
        if self.knee < n.max():
            over = n > self.knee
            base, each = base - over * (self.beyond * self.knee), each + over * self.beyond
        left = 1.0 - rate_rps * (busy_s + steps * each)
        return rate_rps * steps * np.maximum(base, 0.0) / np.maximum(left, _LEAST)


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
        idle = 1.0 - busy
        full = np.maximum(0.0, prompt_tokens / size - 0.5 * idle)
        rest_tokens = np.maximum(0.0, prompt_tokens - full * size)
        rest = np.minimum(1.0, 2.0 * rest_tokens / size)
        full_s = times.prefill_s(n, size)
        rest_s = times.prefill_s(n, rest_tokens / np.maximum(rest, _LEAST))
        return cls(size, full, full_s, rest, rest_s, times.decode_s(n))

    @property
    def alone_s(self) -> Floats:
        """Time of the steps that compute a prompt."""
        return self.full * self.full_s + self.rest * self.rest_s

    @property
    def extra_s(self) -> Floats:
        """What a prompt adds to the time of steps that decode anyway."""
        return self.full * (self.full_s - self.decode_s) + self.rest * (self.rest_s - self.decode_s)


_LEAST = 1e-9
