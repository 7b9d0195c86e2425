"""Make traces from fitted statistics: arrivals, lengths, and sessions that share prefixes. As a stream or whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from envs.workload.arrivals import Envelope, TwoStates, arrival_batches
from envs.workload.lengths import Distribution
from envs.workload.sessions import Conversations, Sessions, continue_sessions, hold_conversations
from envs.workload.trace import Trace, TraceError, TraceRequest, from_requests


@dataclass(frozen=True)
class Workload:
    """A built-in workload: what it stands for, what it is hard for, where its parameters come from, how to make it.

    ``rate``: an envelope is repeated over the duration (a day, a pattern of peaks); two states are drawn. It is the
    rate of requests, also where ``sessions`` are conversations: fewer of them begin. ``then``: regimes that follow,
    each after ``regime_s`` seconds of the one before; the last one lasts.
    """

    name: str
    description: str
    fitted_to: str
    rate: Envelope | TwoStates
    gap_cv: float
    prompt: Distribution
    output: Distribution
    sessions: Sessions | Conversations | None = None
    stresses: str = ""
    then: tuple[Workload, ...] = ()
    regime_s: float = 0.0

    def __post_init__(self) -> None:
        if self.then and not self.regime_s > 0:
            raise ValueError(f"{self.name}: regimes that follow one another need regime_s > 0")
        if len({regime.block_tokens for regime in self.regimes} - {0.0}) > 1:
            raise ValueError(f"{self.name}: all regimes that share prefixes need blocks of one size")

    @property
    def regimes(self) -> tuple[Workload, ...]:
        return (self, *self.then)

    @property
    def mean_rps(self) -> float:
        """Of the first regime."""
        return self.rate.mean_rps

    @property
    def block_tokens(self) -> float:
        return float(self.sessions.block_tokens) if self.sessions is not None else 0.0


def stream(workload: Workload, *, duration_s: float, seed: int, rate_scale: float = 1.0) -> Iterator[TraceRequest]:
    """Requests in order of arrival, in [0, duration), made as they are taken: memory does not grow with the duration.

    The same arguments give the same requests, in any process. ``rate_scale`` multiplies the rate.
    """
    if not workload.then:
        yield from _regime(workload, duration_s, np.random.SeedSequence(seed), rate_scale)
        return
    start = 0.0
    for number, (regime, regime_seed) in enumerate(
        zip(workload.regimes, np.random.SeedSequence(seed).spawn(len(workload.regimes)), strict=True)
    ):
        is_last = number == len(workload.then)
        length = duration_s - start if is_last else min(workload.regime_s, duration_s - start)
        if length <= 0:
            return
        for request in _regime(regime, length, regime_seed, rate_scale):
            # Regimes number their blocks from 0; nothing is shared between them.
            ids = tuple(block * len(workload.regimes) + number for block in request.hash_ids)
            yield replace(request, arrival_s=start + request.arrival_s, hash_ids=ids)
        start += length


def generate(workload: Workload, *, duration_s: float, seed: int, rate_scale: float = 1.0) -> Trace:
    """A trace of ``duration_s`` seconds, shifted so that the first request arrives at 0 s: the whole of :func:`stream`.

    Raises TraceError when the duration is so short that nothing arrives.
    """
    requests = list(stream(workload, duration_s=duration_s, seed=seed, rate_scale=rate_scale))
    if not requests:
        rate = workload.mean_rps * rate_scale
        raise TraceError(f"{workload.name}: nothing arrives in {duration_s:g} s at {rate:.3g} requests/s")
    note = f"generated: {workload.name}, seed {seed}, {duration_s:g} s, fitted to {workload.fitted_to}"
    if rate_scale != 1:
        note += f"; rate multiplied by {rate_scale:g}"
    block = max(regime.block_tokens for regime in workload.regimes)
    return from_requests(workload.name, requests, block_tokens=block, notes=(note,))


def _regime(
    workload: Workload, duration_s: float, seeds: np.random.SeedSequence, rate_scale: float
) -> Iterator[TraceRequest]:
    envelope_seed, arrival_seed, length_seed, session_seed, growth_seed = seeds.spawn(5)
    if isinstance(workload.rate, TwoStates):
        envelope = workload.rate.draw(duration_s, np.random.default_rng(envelope_seed))
    else:
        envelope = workload.rate.covering(duration_s)
    envelope = envelope.scaled(rate_scale)
    sessions, warm_up_s = workload.sessions, 0.0
    if isinstance(sessions, Conversations):
        # Without earlier sessions the rate would climb for as long as sessions last.
        warm_up_s = sessions.warm_up_s(workload.output.mean)
        envelope = _preceded(envelope.scaled(1.0 / sessions.mean_turns), warm_up_s)
    plain = _plain(workload, envelope, np.random.default_rng(arrival_seed), length_seed)
    session_rng = np.random.default_rng(session_seed)
    if isinstance(sessions, Sessions):
        yield from continue_sessions(plain, sessions, session_rng, np.random.default_rng(growth_seed))
    elif sessions is not None:
        for request in hold_conversations(plain, sessions, workload.output, session_rng):
            if request.arrival_s >= warm_up_s + duration_s:
                return
            if request.arrival_s >= warm_up_s:
                yield replace(request, arrival_s=request.arrival_s - warm_up_s)
    else:
        yield from plain


def _plain(
    workload: Workload, envelope: Envelope, rng: np.random.Generator, length_seed: np.random.SeedSequence
) -> Iterator[TraceRequest]:
    prompt_rng, output_rng = (np.random.default_rng(seed) for seed in length_seed.spawn(2))
    for times in arrival_batches(envelope, workload.gap_cv, rng):
        prompts, outputs = workload.prompt.draw(len(times), prompt_rng), workload.output.draw(len(times), output_rng)
        for time, prompt, output in zip(times.tolist(), prompts, outputs, strict=True):
            yield TraceRequest(time, prompt, output)


def _preceded(envelope: Envelope, seconds: float) -> Envelope:
    """The envelope, moved later, behind a stretch at its first rate."""
    edges = (0.0, *(seconds + edge for edge in envelope.edges_s))
    cvs = None if envelope.gap_cvs is None else (envelope.gap_cvs[0], *envelope.gap_cvs)
    return Envelope(edges, (envelope.rates_rps[0], *envelope.rates_rps), cvs)


def at_least_one(requests: Iterable[TraceRequest], nothing: str) -> Iterator[TraceRequest]:
    """The same requests, or a TraceError that says ``nothing`` when there is none: for streams that are written."""
    taken = iter(requests)
    head = next(taken, None)
    if head is None:
        raise TraceError(nothing)
    return chain((head,), taken)
