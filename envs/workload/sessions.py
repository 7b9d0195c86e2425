"""Requests that share prefixes: an agent or a chat resends its whole context with every turn.

Two models. :class:`Sessions` has a rate of requests, each of which may go on with an open session: it fits traces whose
sessions are unknown. :class:`Conversations` has a rate of sessions, each with turns, answers and pauses to think: later
turns arrive because earlier ones did, however the rate has changed since.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Final

import numpy as np

from envs.workload.lengths import Distribution
from envs.workload.trace import TraceRequest

_BATCH: Final = 4096


@dataclass(frozen=True)
class Sessions:
    """With probability ``again`` a request continues an open session, its prompt being the session's whole context so
    far and some new tokens. New sessions begin with one of ``system_prompts`` shared beginnings.
    """

    again: float
    growth: Distribution
    block_tokens: int
    open_sessions: int = 16
    system_prompts: int = 0
    system_tokens: int = 0
    context_tokens: int = 100_000  # a session that outgrows it is closed


@dataclass(frozen=True)
class Conversations:
    """Sessions of ``mean_turns`` turns (geometric). A turn's prompt is all that came before, answers included, and a
    question; it comes when the answer before it has been read: ``token_s`` per token of it, then ``think_s``.

    The workload's prompt distribution is the first question, ``question`` the later ones, in tokens.
    """

    mean_turns: float
    think_s: Distribution
    question: Distribution
    block_tokens: int
    token_s: float = 0.05
    system_prompts: int = 0
    system_tokens: int = 0
    context_tokens: int = 100_000

    def warm_up_s(self, mean_output: float) -> float:
        """How long until sessions that start now are as many as those that end: three mean lives."""
        return 3.0 * self.mean_turns * (self.think_s.mean + self.token_s * mean_output)


@dataclass
class _Session:
    blocks: list[int]
    tokens: int = 0

    def ids(self, block_tokens: int, fresh: Iterator[int]) -> tuple[int, ...]:
        """Ids of the context as it is. Only whole blocks are kept: a part of one holds other tokens next time."""
        whole = self.tokens // block_tokens
        while len(self.blocks) < whole:
            self.blocks.append(next(fresh))
        rest = [next(fresh)] if self.tokens % block_tokens else []
        return (*self.blocks[:whole], *rest)


def continue_sessions(
    requests: Iterable[TraceRequest], sessions: Sessions, rng: np.random.Generator, growth_rng: np.random.Generator
) -> Iterator[TraceRequest]:
    """Give each request hash ids: a fresh session's, or an open one's context with new blocks behind it."""
    fresh = count(sessions.system_prompts * sessions.system_tokens)  # below: the ids of the shared beginnings
    opened: list[_Session] = []
    growths = drawn(sessions.growth, growth_rng)
    for request in requests:
        growth = next(growths)
        if opened and rng.random() < sessions.again:
            session = opened[int(rng.integers(len(opened)))]
            session.tokens += growth
        else:
            session = _Session(_beginning(sessions, rng), request.prompt_tokens)
            opened.append(session)
            if len(opened) > sessions.open_sessions:
                opened.pop(0)
        ids = session.ids(sessions.block_tokens, fresh)
        yield TraceRequest(request.arrival_s, session.tokens, request.output_tokens, ids)
        if session.tokens >= sessions.context_tokens and session in opened:
            opened.remove(session)


@dataclass(order=True)
class _Turn:
    arrival_s: float
    number: int  # ties in time keep the order in which they came up
    session: _Session = field(compare=False)
    question: int = field(compare=False)
    answer: int = field(compare=False)


def hold_conversations(
    starts: Iterable[TraceRequest], conversations: Conversations, output: Distribution, rng: np.random.Generator
) -> Iterator[TraceRequest]:
    """All turns of the sessions that begin with ``starts``, in order of arrival; memory holds the open ones only."""
    fresh = count(conversations.system_prompts * conversations.system_tokens)
    numbers = count()
    questions, answers, pauses = (
        drawn(distribution, np.random.default_rng(seed))
        for distribution, seed in zip(
            (conversations.question, output, conversations.think_s), rng.integers(1 << 63, size=3), strict=True
        )
    )
    waiting: list[_Turn] = []

    def turns(until_s: float) -> Iterator[TraceRequest]:
        while waiting and waiting[0].arrival_s <= until_s:
            turn = heapq.heappop(waiting)
            session = turn.session
            session.tokens += turn.question
            ids = session.ids(conversations.block_tokens, fresh)
            yield TraceRequest(turn.arrival_s, session.tokens, turn.answer, ids)
            session.tokens += turn.answer
            goes_on = rng.random() * conversations.mean_turns >= 1.0
            question, answer = next(questions), next(answers)
            if goes_on and session.tokens + question <= conversations.context_tokens:
                later_s = turn.arrival_s + conversations.token_s * turn.answer + next(pauses)
                heapq.heappush(waiting, _Turn(later_s, next(numbers), session, question, answer))

    for start in starts:
        yield from turns(start.arrival_s)
        session = _Session(_beginning(conversations, rng))
        # The system prompt comes first, and the question is at least one token behind it.
        session.tokens = conversations.system_tokens if conversations.system_prompts else 0
        heapq.heappush(
            waiting, _Turn(start.arrival_s, next(numbers), session, start.prompt_tokens, start.output_tokens)
        )
    yield from turns(np.inf)


def drawn(distribution: Distribution, rng: np.random.Generator) -> Iterator[int]:
    """An endless stream of draws, made in batches."""
    while True:
        yield from distribution.draw(_BATCH, rng)


def _beginning(model: Sessions | Conversations, rng: np.random.Generator) -> list[int]:
    if not model.system_prompts:
        return []
    which = int(rng.integers(model.system_prompts))
    return [which * model.system_tokens + i for i in range(model.system_tokens // model.block_tokens)]
