"""Summaries from exact numbers."""

from __future__ import annotations

import io
import json
from array import array

import pytest
from rich.console import Console

from autotune.replay.records import Outcome, RequestRecord
from autotune.replay.summary import Summary, Targets, request_tbt_s, summarise
from autotune.replay.view import summary_table


def record(index: int, scheduled: float, *times: float, failure: str = "") -> RequestRecord:
    made = RequestRecord(index, scheduled, 10, len(times), sent_s=scheduled + 0.001)
    made.token_times_s = array("d", times)
    made.output_tokens = len(times)
    if failure:
        made.fail(failure, "broken", scheduled + 0.5)
    elif times:
        made.outcome, made.finished_s = Outcome.COMPLETED, times[-1]
    return made


def test_counts_rates_and_targets() -> None:
    records = [
        record(0, 0.0, 0.1, 0.2, 0.3),  # inside
        record(1, 1.0, 1.5, 1.6, 1.7),  # TTFT 0.5: tolerable
        record(2, 2.0, 2.1, 2.9, 3.0),  # one gap of 0.8: beyond four times the target
        record(3, 3.0, failure="http_429"),
        record(4, 4.0, 5.0, 5.05),  # TTFT 1.0: beyond
    ]
    summary = summarise(records, Targets(ttft_s=0.2, tbt_s=0.15, tbt_quantile=1.0))
    assert (summary.offered, summary.completed, summary.failed, summary.cancelled) == (5, 4, 1, 0)
    assert summary.failures == {"http_429": 1}
    assert summary.first_failure == "broken"
    assert summary.duration_s == pytest.approx(5.05)
    assert summary.within_targets == 1
    assert summary.goodput_rps == pytest.approx(1 / 5.05)
    assert summary.slo_attainment == pytest.approx(1 / 5)
    assert summary.apdex == pytest.approx((1 + 0.5) / 5)
    assert summary.output_tokens_per_s == pytest.approx(11 / 5.05)
    assert summary.ttft is not None
    assert summary.ttft.max_s == pytest.approx(1.0)
    assert summary.tbt is not None
    assert summary.tbt.p50_s == pytest.approx(0.1)
    json.dumps(summary.to_json())


def test_apdex_is_of_targets_and_is_not_told_without() -> None:
    records = [record(0, 0.0, 0.1), record(1, 1.0, 1.5)]
    assert summarise(records, Targets()).apdex is None
    assert "Apdex" not in shown(summarise(records, Targets()))
    assert "Apdex" in shown(summarise(records, Targets(ttft_s=0.2)))
    assert "0.750 by the same targets" in shown(summarise(records, Targets(ttft_s=0.2)))


def shown(summary: Summary) -> str:
    console = Console(record=True, width=200, file=io.StringIO())
    console.print(summary_table(summary, "t"))
    return console.export_text()


def test_ttft_counts_from_the_scheduled_arrival() -> None:
    late = record(0, 1.0, 3.0)
    late.sent_s = 2.9
    assert late.ttft_s == pytest.approx(2.0)
    assert late.send_delay_s == pytest.approx(1.9)


def test_cancelled_requests_are_not_failures() -> None:
    cancelled = record(0, 0.0)
    cancelled.outcome, cancelled.finished_s = Outcome.CANCELLED, 1.0
    summary = summarise([cancelled, record(1, 0.0, 0.1)], Targets(), partial=True)
    assert (summary.cancelled, summary.failed, summary.completed, summary.partial) == (1, 0, 1, True)
    assert summary.slo_attainment == 1.0


def test_nothing_sent_is_unknown_not_zero() -> None:
    summary = summarise([], Targets())
    assert (summary.ttft, summary.tbt, summary.apdex, summary.slo_attainment) == (None, None, None, None)


def test_the_quantile_of_a_request_is_by_nearest_rank() -> None:
    made = record(0, 0.0, *(0.1 * i for i in range(20)), 5.0)
    assert request_tbt_s(made, 0.95) == pytest.approx(0.1)
    assert request_tbt_s(made, 1.0) == pytest.approx(3.1)
    assert request_tbt_s(record(0, 0.0, 1.0), 0.95) == 0.0
