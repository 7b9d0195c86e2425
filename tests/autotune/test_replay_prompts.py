"""Prompts: exact lengths, and what the trace shares is shared."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.replay.prompts import TextPrompts, TokenPrompts
from envs.workload.prefixes import shared_fraction
from envs.workload.trace import Trace, TraceRequest

VOCABULARY = tuple(range(100, 600))


def common(a: list[int], b: list[int]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


@given(
    shared=st.integers(0, 6),
    own=st.integers(1, 4),
    block=st.floats(0.3, 70.0),
    cut=st.integers(1, 300),
    index=st.integers(0, 9),
)
def test_shared_blocks_are_shared_and_nothing_else(shared: int, own: int, block: float, cut: int, index: int) -> None:
    maker = TokenPrompts(VOCABULARY, block)
    first = TraceRequest(0, min(cut, max(1, round((shared + own) * block))), 1, tuple(range(shared + own)))
    second = TraceRequest(0, 320, 1, (*range(shared), *range(1000, 1000 + own)))
    a, b = maker.make(first, index), maker.make(second, index + 1)
    assert (len(a), len(b)) == (first.prompt_tokens, second.prompt_tokens)
    expected = min(round(shared * block), len(a), len(b))
    assert common(a, b) >= expected
    # Own tokens agree by chance only: 1 in 500 each.
    assert common(a, b) <= expected + 3
    assert maker.make(first, index) == a


def test_requests_without_ids_share_nothing() -> None:
    maker = TokenPrompts(VOCABULARY, 0.0)
    request = TraceRequest(0, 50, 1)
    assert maker.make(request, 0) != maker.make(request, 1)
    assert maker.make(request, 0) == maker.make(request, 0)
    assert TokenPrompts(VOCABULARY, 0.0, seed=1).make(request, 0) != maker.make(request, 0)
    assert set(maker.make(TraceRequest(0, 5000, 1), 3)) <= set(VOCABULARY)


def test_text_prompts_share_beginnings_and_have_about_their_length() -> None:
    maker = TextPrompts(1.25, 16)
    a = maker.make(TraceRequest(0, 100, 1, (1, 2, 3, 4)), 0).split(" ")
    b = maker.make(TraceRequest(0, 80, 1, (1, 2, 9)), 1).split(" ")
    assert len(a) == pytest.approx(80, abs=2)
    shared = round(16 / 1.25)
    assert a[: 2 * shared] == b[: 2 * shared]
    assert a[2 * shared :] != b[2 * shared : len(a)]


def test_shared_fraction_counts_leading_blocks_seen_before() -> None:
    requests = (
        TraceRequest(0, 32, 1, (1, 2)),
        TraceRequest(1, 48, 1, (1, 2, 3)),
        TraceRequest(2, 32, 1, (9, 2)),  # 2 is known, but not behind 9
    )
    assert shared_fraction(Trace("t", requests, 16.0)) == pytest.approx(32 / 112)
