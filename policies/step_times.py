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
# Arrays without dimensions: numpy takes them faster than Python's numbers.
ZERO: Final[Floats] = np.array(0.0)
ONE: Final[Floats] = np.array(1.0)
_HALF: Final[Floats] = np.array(0.5)
_LEAST: Final[Floats] = np.array(1e-9)


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
        return self.base + self.each * n + self.beyond * np.maximum(ZERO, n - self.knee)

    def decode_one_s(self, n: float) -> Floats:
        """As :meth:`decode_s`, the same number of sequences under each setting."""
        return (self.base + self.beyond * max(0.0, n - self.knee)) + self.each * n

    def balance(
        self, rate_rps: float, steps: float, busy_s: Floats, held_up_s: Floats, guess: Floats, most: float
    ) -> Floats:
        """How many decode when requests of ``steps`` tokens arrive at a rate, each takes ``busy_s`` of steps' time for
        its prompt and waits ``held_up_s`` for others'; a very large number where that cannot be kept up. ``guess``: how
        many, at first, for the knee; no more than ``most`` anywhere.
        """
        base: Floats | float = self.base
        each = self.each
        if most > self.knee:
            over = self.beyond * (guess > self.knee)
            base, each = np.maximum(ZERO, base - over * self.knee), each + over
        left = ONE - rate_rps * (busy_s + steps * each)
        wanted: Floats = rate_rps * (steps * base + held_up_s) / np.maximum(_LEAST, left)
        return wanted


@dataclass(frozen=True, slots=True)
class Chunks:
    """How prompts are cut while ``n`` sequences decode, per request: ``full`` chunks of ``size`` tokens that take
    ``full_s`` each, and ``rest`` (0 to 1) smaller ones. ``decode_s``: a step without any. ``alone_s``: the steps that
    compute a prompt.
    """

    size: Floats
    full: Floats
    full_s: Floats
    rest: Floats
    decode_s: Floats
    alone_s: Floats
    _times: StepTimes
    _plain_s: Floats  # a chunk's step up to the knee, without the chunk's tokens
    _above: Floats  # sequences beyond the knee, negative below it

    @classmethod
    def of(cls, times: StepTimes, n: Floats, prompt_tokens: float, busy: Floats | None = None) -> Chunks:
        """``busy``: share of time that prompts are under way, None for hardly any. The more, the likelier another one
        fills up the chunk.
        """
        size = np.maximum(ONE, times.budget - n)
        share = prompt_tokens / size
        full = np.maximum(ZERO, share - (_HALF if busy is None else _HALF * (ONE - busy)))
        left = share - full  # of a full chunk
        rest = np.minimum(ONE, left + left)
        decodes_s, above = times.base + times.each * n, n - times.knee
        plain_s = decodes_s + times.chunk
        full_s = _with(times, plain_s, above, size)
        # In one chunk, if there is one.
        rest_s = _with(times, plain_s, above, size * np.maximum(_HALF, left))
        decode_s = decodes_s + times.beyond * np.maximum(ZERO, above)
        alone_s = full * full_s + rest * rest_s
        return cls(size, full, full_s, rest, decode_s, alone_s, times, plain_s, above)

    @property
    def extra_s(self) -> Floats:
        """What a prompt adds to the time of steps that decode anyway."""
        return self.alone_s - (self.full + self.rest) * self.decode_s

    def step_s(self, tokens: Floats) -> Floats:
        """A step with a chunk of so many tokens."""
        return _with(self._times, self._plain_s, self._above, tokens)


def packed_s(times: StepTimes, n: Floats, steps: float, prompt_tokens: float) -> Floats:
    """Time per request, where requests of ``steps`` tokens come so fast that ``n`` always decode and every chunk is
    full: its share of all steps, or the steps that compute its prompt if those take longer. ``n`` is a limit: where
    chunks are full in every step, fewer decode, as many as end while their prompts are computed.
    """
    n = np.minimum(n, (steps / (prompt_tokens + steps)) * times.budget)
    size = np.maximum(ONE, times.budget - n)
    decodes_s, above = times.base + times.each * n, n - times.knee
    full_s = _with(times, decodes_s + times.chunk, above, size)
    decode_s = decodes_s + times.beyond * np.maximum(ZERO, above)
    chunks = prompt_tokens / size
    alone_s = chunks * full_s
    longest: Floats = np.maximum(decode_s * (steps / n - chunks) + alone_s, alone_s)
    return longest


def _with(times: StepTimes, plain_s: Floats, above: Floats, tokens: Floats) -> Floats:
    step_s = above + tokens
    np.maximum(ZERO, step_s, out=step_s)
    step_s *= times.beyond
    step_s += plain_s
    step_s += times.token * tokens
    return step_s
