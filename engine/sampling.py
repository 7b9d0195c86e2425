"""From logits to tokens: greedy, temperature, top-k, top-p, penalties, log-probabilities; one batch at a time.

A request's draw number i is a function of its seed and i alone, so what it samples depends neither on the batch that it
runs in nor on preemption. Log-probabilities are those of the model, before penalties and temperature (as in vLLM).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from engine.plan import TokenLogprobs
from engine.request import Request, SamplingParams

_MASK64 = (1 << 64) - 1
_TOP_CANDIDATES = 1024  # the nucleus is sought among these before the whole vocabulary is sorted
_LOGPROB_ELEMENTS = 1 << 24  # log-softmax of a prompt goes in slices of about this many elements


def uniform(seed: int, index: int) -> float:
    """Draw number ``index`` of a stream, in [0, 1): the splitmix64 finaliser (Steele et al. 2014) over both."""
    state = (seed * 0xD1342543DE82EF95 + (index + 1) * 0x9E3779B97F4A7C15) & _MASK64
    for _ in range(2):
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
        state ^= state >> 31
    return (state >> 11) * 2.0**-53


@dataclass
class _TokenCounts:
    """How often each token occurred, on the logits' device, up to ``known`` output tokens."""

    in_output: Tensor  # float32 [vocab]
    in_prompt: Tensor  # bool [vocab]
    known: int = 0


def likeliest(logits: Tensor) -> list[int]:
    """Of each row the token of the largest logit, the first one of equals."""
    if logits.device.type == "cpu":  # numpy looks at many elements at a time, torch at one
        found: list[int] = logits.numpy().argmax(axis=-1).tolist()
        return found
    return logits.argmax(dim=-1).tolist()


class Sampler:
    """Chooses one token per row. Keeps per request only its seed and, where penalised, its token counts."""

    def __init__(self, rng: random.Random) -> None:
        """``rng`` gives a seed to every sampled request that names none."""
        self._rng = rng
        self._seeds: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
        self._counts: WeakKeyDictionary[Request, _TokenCounts] = WeakKeyDictionary()

    def sample(self, logits: Tensor, requests: Sequence[Request]) -> list[int]:
        """The next token id of each request. ``logits`` float32 [requests, vocab] is not changed.

        Waits for the device once.
        """
        penalised = [row for row, request in enumerate(requests) if request.params.has_penalties]
        if penalised:
            logits = logits.clone()
            for row in penalised:
                self._penalise(logits[row], requests[row])
        random_rows = [row for row, request in enumerate(requests) if not request.params.is_greedy]
        if not random_rows:
            return likeliest(logits)
        tokens = logits.argmax(dim=-1)
        everything = len(random_rows) == len(requests)
        rows = torch.tensor(random_rows, device=logits.device)
        chosen = [requests[row] for row in random_rows]
        drawn = self._draw(logits if everything else logits[rows], chosen)
        tokens[rows] = drawn
        return tokens.tolist()

    def _penalise(self, row: Tensor, request: Request) -> None:
        """Apply OpenAI's presence and frequency penalties and the repetition penalty (Keskar et al. 2019) in place."""
        params, counts = request.params, self._counts_of(request, row)
        if params.repetition_penalty != 1.0:
            seen = counts.in_prompt | (counts.in_output > 0)
            penalty = params.repetition_penalty
            row.copy_(torch.where(seen, torch.where(row > 0, row / penalty, row * penalty), row))
        if params.frequency_penalty != 0.0:
            row.sub_(counts.in_output, alpha=params.frequency_penalty)
        if params.presence_penalty != 0.0:
            row.sub_((counts.in_output > 0).to(row.dtype), alpha=params.presence_penalty)

    def _counts_of(self, request: Request, row: Tensor) -> _TokenCounts:
        counts = self._counts.get(request)
        if counts is None:
            in_prompt = torch.zeros(row.shape, dtype=torch.bool, device=row.device)
            in_prompt[torch.tensor(request.prompt_ids, device=row.device)] = True
            counts = self._counts[request] = _TokenCounts(torch.zeros_like(row), in_prompt)
        new = request.output_ids[counts.known :]
        if new:
            ids = torch.tensor(new, device=row.device)
            counts.in_output.index_add_(0, ids, torch.ones(len(new), dtype=row.dtype, device=row.device))
            counts.known = len(request.output_ids)
        return counts

    def _seed_of(self, request: Request) -> int:
        seed = request.params.seed
        if seed is not None:
            return seed & _MASK64
        drawn = self._seeds.get(request)
        if drawn is None:
            drawn = self._seeds[request] = self._rng.getrandbits(64)
        return drawn

    def _draw(self, logits: Tensor, requests: Sequence[Request]) -> Tensor:
        """Tokens int64 [rows] of non-greedy requests, by inverting the distribution function at one uniform each."""
        params = [request.params for request in requests]
        temperature = torch.tensor([p.temperature for p in params], device=logits.device)[:, None]
        # Shifted to a maximum of 0 first, so that tiny temperatures do not overflow.
        scaled = (logits - logits.max(dim=-1, keepdim=True).values) / temperature
        draws = [uniform(self._seed_of(request), len(request.output_ids)) for request in requests]
        uniforms = torch.tensor(draws, dtype=torch.float64, device=logits.device)[:, None]
        if all(p.top_p >= 1.0 and p.top_k <= 0 for p in params):
            return _invert(torch.softmax(scaled, dim=-1), uniforms)[:, 0]
        probabilities, ids = _truncate(scaled, params)
        return ids.gather(1, _invert(probabilities, uniforms))[:, 0]


def _invert(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """First index whose cumulated probability exceeds uniform x total; int64 [rows, 1], never one of probability 0."""
    cumulated = probabilities.cumsum(dim=-1, dtype=torch.float64)
    total = cumulated[:, -1:]
    below_total = torch.nextafter(total, torch.zeros_like(total))
    found = torch.searchsorted(cumulated, torch.minimum(uniforms * total, below_total), right=True)
    # Past the end where a row holds NaN: such a row must not take the others of its batch with it.
    return found.clamp_(max=probabilities.shape[-1] - 1)


def _truncate(scaled: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
    """Top-k, then top-p of what it leaves. Returns weights (0 outside) and token ids, [rows, candidates], descending.

    A row without either limit keeps its whole vocabulary.
    """
    vocab = scaled.shape[-1]
    limits = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
    top_p = torch.tensor([p.top_p for p in params], device=scaled.device)[:, None]
    top_k = torch.tensor(limits, device=scaled.device)[:, None]
    needs_all = any(p.top_p >= 1.0 and limit == vocab for p, limit in zip(params, limits, strict=True))
    if not needs_all and vocab > _TOP_CANDIDATES:
        values, ids = scaled.topk(min(vocab, max(_TOP_CANDIDATES, *(k for k in limits if k < vocab), 1)), dim=-1)
        total = torch.where(top_k < vocab, torch.zeros_like(top_p), scaled.exp().sum(dim=-1, keepdim=True))
        kept, reached = _nucleus(values, top_k, top_p, total)
        if bool(reached.all()):
            return kept, ids
    values, ids = scaled.sort(dim=-1, descending=True, stable=True)
    kept, _ = _nucleus(values, top_k, top_p, torch.zeros_like(top_p))
    return kept, ids


def _nucleus(values: Tensor, top_k: Tensor, top_p: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of the candidates that stay, and whether the candidates sufficed, per row.

    ``total``: weight of the whole vocabulary for rows limited by top-p alone; 0 where the candidates are all there is.
    """
    ranks = torch.arange(values.shape[-1], device=values.device)
    weights = torch.where(ranks < top_k, values.exp(), 0.0)
    cumulated = weights.cumsum(dim=-1)
    whole = torch.where(total > 0, total, cumulated[:, -1:])
    before = cumulated - weights
    kept = torch.where((before < top_p * whole) | (ranks == 0), weights, 0.0)
    reached = (total == 0) | (cumulated[:, -1:] >= top_p * whole)
    return kept, reached


def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Log-probability and rank (1 is the likeliest) of one token per row, and the row's ``num_top`` likeliest tokens.

    ``logits`` float32 [rows, vocab]. Rows are done in slices, so a long prompt needs no second copy of its logits.
    """
    results: list[TokenLogprobs] = []
    step = max(1, _LOGPROB_ELEMENTS // logits.shape[-1])
    for start in range(0, logits.shape[0], step):
        stop = min(start + step, logits.shape[0])
        results += _logprob_slice(logits[start:stop], token_ids[start:stop], num_top[start:stop])
    return results


def _logprob_slice(logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    logprobs = torch.log_softmax(logits, dim=-1)
    own = logprobs.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])
    ranks = (logprobs > own).sum(dim=-1) + 1
    width = min(max(num_top), logits.shape[-1])
    top_values, top_ids = logprobs.topk(width, dim=-1)
    tops = [list(zip(*row, strict=True)) for row in zip(top_ids.tolist(), top_values.tolist(), strict=True)]
    rows = zip(token_ids, own[:, 0].tolist(), ranks.tolist(), num_top, tops, strict=True)
    return [TokenLogprobs(token, logprob, rank, tuple(top[:count])) for token, logprob, rank, count, top in rows]
