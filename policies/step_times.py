"""Times of steps as functions of how many sequences decode: the latency model's terms, summed by settings. numpy only.

A step computes one token of each of ``n`` decoding sequences and, where prompts are under way, a chunk of what its
token budget leaves. Chunks come in two kinds: full ones, and the rest of a prompt that nobody follows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
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

    def room(self, n: Floats) -> Floats:
        """Tokens that the budget leaves for a chunk."""
        return np.maximum(1.0, self.budget - n)

    def balance(self, rate_rps: float, steps: float, busy_s: Floats, n: Floats) -> Floats:
        """How many decode when requests of ``steps`` tokens arrive at a rate and each takes ``busy_s`` of steps' time
        for its prompt: infinite where that cannot be kept up. ``n``: a first guess, telling the side of the knee.
        """
        over = n > self.knee
        base = np.where(over, self.base - self.beyond * self.knee, self.base)
        each = np.where(over, self.each + self.beyond, self.each)
        left = 1.0 - rate_rps * busy_s - rate_rps * steps * each
        return np.where(left > 1e-6, rate_rps * steps * np.maximum(base, 0.0) / np.maximum(left, 1e-6), np.inf)


@dataclass(frozen=True)
class Chunks:
    """How prompts are cut, per request: ``full`` chunks of ``size`` tokens and ``rest`` (0 to 1) of ``rest_size``."""

    full: Floats
    size: Floats
    rest: Floats
    rest_size: Floats

    @classmethod
    def of(cls, room: Floats, prompt_tokens: float, busy: Floats) -> Chunks:
        """``busy``: share of time that prompts are under way. The more, the likelier another one fills up the chunk."""
        idle = np.clip(1.0 - busy, 0.0, 1.0)
        full = np.maximum(0.0, prompt_tokens / room - 0.5 * idle)
        rest_size = np.clip(prompt_tokens - full * room, 0.0, room)
        return cls(full, room, np.where(rest_size > 0.5, np.minimum(1.0, 2 * rest_size / room + idle), 0.0), rest_size)

    def extra_s(self, times: StepTimes, n: Floats) -> Floats:
        """What a prompt adds to the time of steps that decode anyway."""
        decode = times.decode_s(n)
        full = self.full * (times.prefill_s(n, self.size) - decode)
        return full + self.rest * (times.prefill_s(n, self._rest_tokens) - decode)

    def alone_s(self, times: StepTimes, n: Floats) -> Floats:
        """Time of the steps that compute a prompt."""
        return self.full * times.prefill_s(n, self.size) + self.rest * times.prefill_s(n, self._rest_tokens)

    @property
    def _rest_tokens(self) -> Floats:
        return self.rest_size / np.maximum(self.rest, 1e-9) * (self.rest > 0)
