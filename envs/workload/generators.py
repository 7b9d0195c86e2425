"""Make traces from fitted statistics: arrivals, lognormal lengths, and sessions that share prefixes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import numpy as np

from envs.workload.arrivals import Envelope, TwoStates, arrivals
from envs.workload.trace import Trace, TraceError, TraceRequest, from_requests


@dataclass(frozen=True)
class Lengths:
    """Token counts: lognormal with this median and sigma (of the logarithm), redrawn bounds applied by clipping."""

    median: float
    sigma: float
    least: int = 1
    most: int = 1_000_000

    def draw(self, number: int, rng: np.random.Generator) -> list[int]:
        values = np.exp(rng.normal(np.log(self.median), self.sigma, size=number))
        return [int(value) for value in np.clip(np.rint(values), self.least, self.most)]

    @property
    def mean(self) -> float:
        """Of the unclipped distribution."""
        return float(self.median * np.exp(self.sigma**2 / 2))


@dataclass(frozen=True)
class Sessions:
    """Prefix sharing: with probability ``again`` a request continues an open session, its prompt being the session's
    whole context so far and some new tokens. New sessions begin with one of ``system_prompts`` shared beginnings.
    """

    again: float
    growth: Lengths
    block_tokens: int
    open_sessions: int = 16
    system_prompts: int = 0
    system_tokens: int = 0
    context_tokens: int = 100_000  # a session that outgrows it is closed


@dataclass(frozen=True)
class Workload:
    """A built-in workload: what it stands for, where its parameters come from, and how to make it.

    ``rate``: an envelope is repeated over the duration (a day, a pattern of peaks); two states are drawn.
    """

    name: str
    description: str
    fitted_to: str
    rate: Envelope | TwoStates
    gap_cv: float
    prompt: Lengths
    output: Lengths
    sessions: Sessions | None = None

    @property
    def mean_rps(self) -> float:
        return self.rate.mean_rps


def generate(workload: Workload, *, duration_s: float, seed: int, rate_scale: float = 1.0) -> Trace:
    """A trace of ``duration_s`` seconds; the same arguments give the same trace. ``rate_scale`` multiplies the rate.

    Raises TraceError when the duration is so short that nothing arrives.
    """
    envelope_seed, arrival_seed, length_seed, session_seed = np.random.SeedSequence(seed).spawn(4)
    if isinstance(workload.rate, TwoStates):
        envelope = workload.rate.draw(duration_s, np.random.default_rng(envelope_seed))
    else:
        envelope = _repeat(workload.rate, duration_s)
    envelope = Envelope(envelope.edges_s, tuple(rate * rate_scale for rate in envelope.rates_rps))
    times = arrivals(envelope, workload.gap_cv, np.random.default_rng(arrival_seed))
    if not len(times):
        raise TraceError(f"{workload.name}: nothing arrives in {duration_s:g} s at {envelope.mean_rps:.3g} requests/s")
    rng = np.random.default_rng(length_seed)
    prompts, outputs = workload.prompt.draw(len(times), rng), workload.output.draw(len(times), rng)
    requests = [TraceRequest(float(t), p, o) for t, p, o in zip(times, prompts, outputs, strict=True)]
    block = 0.0
    if workload.sessions is not None:
        requests = _share_prefixes(requests, workload.sessions, np.random.default_rng(session_seed))
        block = float(workload.sessions.block_tokens)
    note = f"generated: {workload.name}, seed {seed}, {duration_s:g} s, fitted to {workload.fitted_to}"
    if rate_scale != 1:
        note += f"; rate multiplied by {rate_scale:g}"
    return from_requests(workload.name, requests, block_tokens=block, notes=(note,))


def _repeat(envelope: Envelope, duration_s: float) -> Envelope:
    """The envelope from its start, repeated and cut to the duration."""
    edges, rates = [0.0], []
    for turn in count():
        start = turn * envelope.duration_s - envelope.edges_s[0]
        for edge, rate in zip(envelope.edges_s[1:], envelope.rates_rps, strict=True):
            edges.append(min(duration_s, start + edge))
            rates.append(rate)
            if edges[-1] >= duration_s:
                return Envelope(tuple(edges), tuple(rates))
    raise AssertionError("unreachable: the envelope repeats until the duration is covered")


@dataclass
class _Session:
    blocks: list[int]
    tokens: int


def _share_prefixes(requests: list[TraceRequest], sessions: Sessions, rng: np.random.Generator) -> list[TraceRequest]:
    """Give each request hash ids: a fresh session's, or an open one's context with new blocks behind it."""
    fresh = count(sessions.system_prompts * sessions.system_tokens)  # below: the ids of the shared beginnings
    opened: list[_Session] = []
    shared = []
    for request, growth in zip(requests, sessions.growth.draw(len(requests), rng), strict=True):
        if opened and rng.random() < sessions.again:
            session = opened[int(rng.integers(len(opened)))]
            session.tokens += growth
        else:
            session = _Session(_beginning(sessions, rng), request.prompt_tokens)
            opened.append(session)
            if len(opened) > sessions.open_sessions:
                opened.pop(0)
        # Only whole blocks are carried on: a partial one will hold other tokens next time, so its id is new.
        whole = session.tokens // sessions.block_tokens
        while len(session.blocks) < whole:
            session.blocks.append(next(fresh))
        ids = session.blocks[:whole] + ([next(fresh)] if session.tokens % sessions.block_tokens else [])
        shared.append(TraceRequest(request.arrival_s, session.tokens, request.output_tokens, tuple(ids)))
        if session.tokens >= sessions.context_tokens and session in opened:
            opened.remove(session)
    return shared


def _beginning(sessions: Sessions, rng: np.random.Generator) -> list[int]:
    if not sessions.system_prompts:
        return []
    which = int(rng.integers(sessions.system_prompts))
    return [which * sessions.system_tokens + i for i in range(sessions.system_tokens // sessions.block_tokens)]
