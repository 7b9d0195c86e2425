"""Throughput and conversion rows on engines whose steps take what the test says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.cache_bench.rows.conversion import Gaps, measure, percentile
from engine.cache_bench.rows.throughput_concurrency import window
from engine.clock import ManualClock
from engine.request import FinishReason
from engine.request_delta import RequestDelta
from engine.stats import Counters


class FakeCore:
    """Two requests decode; a step takes 10 ms, and ``recode_ms`` more while some of ``due`` tokens are converted."""

    def __init__(self, clock: ManualClock, *, due: int, recode_ms: float, patch_ms: float = 0.0) -> None:
        self.clock, self.due, self.recode_ms, self.patch_ms = clock, due, recode_ms, patch_ms
        self.counters = Counters()
        self.converting = False
        self.reason: FinishReason | None = None

    @property
    def has_background_work(self) -> bool:
        return self.converting and self.due > 0

    def patch(self, _patch: Any) -> None:
        self.converting = True
        self.clock.advance_s(self.patch_ms / 1e3)

    def step(self) -> list[RequestDelta]:
        self.clock.advance_s(0.010)
        if self.has_background_work:
            self.clock.advance_s(self.recode_ms / 1e3)
            self.due -= 100
            self.counters.recoded_tokens += 100
            self.counters.recode_time_ns += int(self.recode_ms * 1e6)
        return [RequestDelta(name, (1,), finish_reason=self.reason) for name in "ab"]

    def stats(self) -> Any:
        share = 1.0 if self.due <= 0 else 0.5
        counters = Counters(**vars(self.counters))
        return SimpleNamespace(counters=counters, gauges=SimpleNamespace(converged_fraction=share))


def test_a_conversion_is_timed_and_its_gaps_are_compared() -> None:
    clock = ManualClock()
    figures = measure(FakeCore(clock, due=5000, recode_ms=2.0), clock, 100)  # type: ignore[arg-type]
    assert figures["conversion_s"] == 0.6
    assert figures["tbt_p99_ratio"] == 1.2
    assert (figures["steps"], figures["recoded_tokens"], figures["recoded_tokens_per_step"]) == (50, 5000, 100)
    assert figures["recode_time_share"] == pytest.approx(1 / 6, abs=1e-3)


def test_a_change_that_blocks_the_engine_is_found_out() -> None:
    clock = ManualClock()
    figures = measure(FakeCore(clock, due=5000, recode_ms=0.0, patch_ms=40), clock, 100)  # type: ignore[arg-type]
    assert figures["tbt_max_ms"] == 50
    assert figures["tbt_p99_ratio"] == 5, "one step of fifty is beyond the 99th percentile of them"


def test_a_request_that_ends_spoils_the_measurement() -> None:
    core = FakeCore(ManualClock(), due=0, recode_ms=0)
    core.reason = FinishReason.LENGTH
    with pytest.raises(RuntimeError, match="ended before"):
        Gaps(core, core.clock).run(lambda: False)  # type: ignore[arg-type]


def test_percentiles_are_values_that_occurred() -> None:
    values = list(range(1, 201))
    assert percentile(values, 0.99) == 198
    assert percentile(values, 0.5) == 100
    assert percentile([7], 0.99) == 7


def test_a_window_adds_up_the_turns_of_each_load() -> None:
    def load(seconds: list[float]) -> Any:
        turns = iter(seconds)
        return SimpleNamespace(turn=lambda tokens: (tokens, int(next(turns) * 1e9)))

    steady, disturbed = load([0.5, 0.5]), load([0.5, 1.5])
    assert window([steady, disturbed], 2) == [1024, 512]
