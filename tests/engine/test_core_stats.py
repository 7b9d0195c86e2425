"""Times of tokens, one by one and together."""

from __future__ import annotations

from engine.core_stats import CoreStats, LiveRequest
from engine.request import Request, SamplingParams
from engine.stats import Counters


def records() -> list[LiveRequest]:
    """Two that had a token together, one later, one never, one in the future."""
    live = [LiveRequest(Request(str(i), [1], SamplingParams(1), arrival_ns=1000 * i)) for i in range(5)]
    for record, last_ns in zip(live, (10_000_000, 10_000_000, 30_000_000, None, 90_000_000), strict=True):
        record.last_token_ns = last_ns
    return live


def test_tokens_counted_together_are_those_counted_one_by_one() -> None:
    one_by_one, together = CoreStats(Counters()), CoreStats(Counters())
    for record in records():
        one_by_one.token(record, 50_000_000)
    live = records()
    together.tokens(live, 50_000_000)
    assert together.itl == one_by_one.itl
    assert together.ttft == one_by_one.ttft
    assert together.distributions.itl == one_by_one.distributions.itl
    assert together.distributions.ttft == one_by_one.distributions.ttft
    assert sum(together.itl.counts) == 4
    assert together.counters.invariant_violations == one_by_one.counters.invariant_violations == 1
    assert {record.last_token_ns for record in live} == {50_000_000}
