"""Sums over judged predictions, by position, against the native cache's predictions of the same tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Figures:
    """What a number of predictions say. Logarithms are natural.

    ``increase_pct``: of perplexity over native's on the same tokens, with its standard error (tokens taken as
    independent). ``kl``: mean Kullback-Leibler divergence of the setting's prediction from native's, over the whole
    vocabulary. ``top1``: how often both find the same token likeliest.
    """

    tokens: int
    perplexity: float
    increase_pct: float
    increase_error_pct: float
    kl: float
    top1: float


class Tally:
    """Sums in ``bins`` equal parts of the samples' positions, and whether each sample was predicted without a slip."""

    def __init__(self, lengths: Sequence[int], bins: int, device: torch.device) -> None:
        """``lengths``: tokens of each sample."""
        self._lengths = torch.tensor(lengths, device=device)
        self._bins = bins
        self._sums = torch.zeros((bins, 6), dtype=torch.float64, device=device)
        self._right = torch.ones(len(lengths), dtype=torch.bool, device=device)

    def add(self, samples: Tensor, positions: Tensor, targets: Tensor, native: Tensor, logprobs: Tensor) -> None:
        """Judge predictions of ``targets``, the tokens at ``positions`` of ``samples`` (int64 [rows]).

        ``native``, ``logprobs``: log-probabilities float32 [rows, vocab] of native and of the setting.
        """
        own = -logprobs.gather(1, targets[:, None])[:, 0].double()
        difference = own + native.gather(1, targets[:, None])[:, 0].double()
        # Tokens of probability 0 count as 0, also where the setting's logarithm is no number.
        kl = torch.where(native == -math.inf, 0.0, native.exp() * (native - logprobs)).sum(dim=-1).double()
        best = logprobs.argmax(dim=-1)
        agrees = best == native.argmax(dim=-1)
        rows = torch.stack((torch.ones_like(own), own, difference, difference**2, kl, agrees.double()), dim=1)
        self._sums.index_add_(0, positions * self._bins // self._lengths[samples], rows)
        self._right[samples[best != targets]] = False

    def figures(self, first: int = 0, stop: int | None = None) -> Figures | None:
        """Of bins ``first`` to ``stop``; None where nothing was judged."""
        tokens, own, difference, squares, kl, agrees = self._sums[first:stop].sum(dim=0).tolist()
        if not tokens:
            return None
        mean = difference / tokens
        ratio = math.exp(mean)
        error = math.sqrt(max(0.0, squares / tokens - mean**2) / tokens) * ratio
        return Figures(
            tokens=int(tokens),
            perplexity=math.exp(own / tokens),
            increase_pct=100 * (ratio - 1),
            increase_error_pct=100 * error,
            kl=kl / tokens,
            top1=agrees / tokens,
        )

    @property
    def right(self) -> list[bool]:
        """Per sample: whether every judged token was the likeliest."""
        return self._right.tolist()

    @property
    def share_right(self) -> float:
        return float(self._right.double().mean())
