"""Splits lose and repeat nothing; writing and reading a trace gives it back; statistics are those of known traces."""

from __future__ import annotations

import gzip
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.workload.loaders import load_trace, stream_trace
from envs.workload.scaling import Scaling, scale
from envs.workload.splits import by_source, sources, split_by_source, split_by_time, window
from envs.workload.statistics import summarise
from envs.workload.trace import Trace, TraceError, TraceRequest, from_requests
from envs.workload.writer import write_trace

REQUESTS = st.lists(
    st.builds(
        TraceRequest,
        # Microseconds: what the plain form keeps.
        st.integers(0, 10**10).map(lambda micro: micro / 1e6),
        st.integers(1, 100_000),
        st.integers(1, 100_000),
        st.lists(st.integers(-(2**60), 2**60), max_size=4).map(tuple),
        st.sampled_from(["a", "b", "client 7", 'quote "x", comma']),
    ),
    min_size=1,
    max_size=30,
)


@given(REQUESTS)
@settings(max_examples=100, deadline=None)
def test_time_windows_hold_every_request_once(requests: list[TraceRequest]) -> None:
    trace = from_requests("t", requests)
    try:
        parts = split_by_time(trace, (0.5, 0.3, 0.2))
    except TraceError:
        return  # a window without requests is refused
    assert sum(len(part.requests) for part in parts) == len(requests)
    lengths = [(r.prompt_tokens, r.output_tokens) for part in parts for r in part.requests]
    assert lengths == [(r.prompt_tokens, r.output_tokens) for r in trace.requests]
    assert all(request.arrival_s >= 0 for part in parts for request in part.requests)


@given(REQUESTS, st.floats(0.05, 0.95), st.integers(0, 3))
@settings(max_examples=100, deadline=None)
def test_no_source_is_on_both_sides(requests: list[TraceRequest], share: float, seed: int) -> None:
    trace = from_requests("t", requests)
    if len(sources(trace)) < 2:
        with pytest.raises(TraceError, match="two must differ"):
            split_by_source(trace, share, seed)
        return
    some, others = split_by_source(trace, share, seed)
    assert not sources(some).keys() & sources(others).keys()
    assert Counter(some.requests) + Counter(others.requests) == Counter(trace.requests)
    assert some.requests
    assert others.requests
    assert split_by_source(trace, share, seed) == (some, others)
    assert {name: len(part.requests) for name, part in by_source(trace).items()} == sources(trace)


@given(REQUESTS, st.sampled_from([0.0, 16.0, 0.25, 512.0]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_written_trace_reads_the_same(
    tmp_path_factory: pytest.TempPathFactory, requests: list[TraceRequest], block: float, packed: bool
) -> None:
    trace = from_requests("t", requests, block_tokens=block)
    path = tmp_path_factory.mktemp("w") / ("t.csv.gz" if packed else "t.csv")
    assert write_trace(path, trace.requests, block_tokens=block) == len(requests)
    loaded = load_trace(path)
    assert loaded.block_tokens == block
    for was, now in zip(trace.requests, loaded.requests, strict=True):
        assert now.arrival_s == pytest.approx(was.arrival_s, abs=1e-6)
        assert now.prompt_tokens == was.prompt_tokens
        assert now.output_tokens == was.output_tokens
        assert now.source == was.source
        assert now.hash_ids == (was.hash_ids if block else ())
    assert list(stream_trace(path)) == list(loaded.requests)


def test_writing_is_all_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"

    def broken() -> list[TraceRequest]:
        raise TraceError("the source is damaged")

    with pytest.raises(TraceError, match="damaged"):
        write_trace(path, (request for request in broken()))
    assert not list(tmp_path.iterdir())
    write_trace(path, [TraceRequest(0.0, 1, 1)])
    with pytest.raises(TraceError, match="exists already"):
        write_trace(path, [TraceRequest(0.0, 2, 2)])
    assert load_trace(path).requests[0].prompt_tokens == 1
    write_trace(path, [TraceRequest(0.0, 2, 2)], force=True)
    assert load_trace(path).requests[0].prompt_tokens == 2
    with pytest.raises(TraceError, match="cannot be written"):
        write_trace(tmp_path / "none" / "t.csv", [TraceRequest(0.0, 1, 1)])


def test_the_same_trace_makes_the_same_packed_bytes(tmp_path: Path) -> None:
    one, two = tmp_path / "one.csv.gz", tmp_path / "two.csv.gz"
    for path in (one, two):
        write_trace(path, [TraceRequest(0.0, 1, 1)])
    assert one.read_bytes() == two.read_bytes()
    assert gzip.decompress(one.read_bytes()).startswith(b"arrival_s,")


def test_streaming_refuses_what_needs_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n5,1,1\n4,1,1\n")
    with pytest.raises(TraceError, match="not in order of arrival"):
        list(stream_trace(path))
    path.write_text("prompt_tokens,output_tokens\n5,1\n")
    with pytest.raises(TraceError, match="no arrival times"):
        list(stream_trace(path))


def test_a_window_keeps_its_silence_and_says_so() -> None:
    trace = Trace("t", tuple(TraceRequest(float(i), 1, 1) for i in range(10)))
    part = window(trace, 2.5, 5.0)
    assert [request.arrival_s for request in part.requests] == [0.5, 1.5]
    assert part.notes == ("window from 2.5 s to 5 s: 2 of 10 requests",)
    with pytest.raises(TraceError, match="no request arrives"):
        window(trace, 50)
    with pytest.raises(ValueError, match="sum to 1"):
        split_by_time(trace, (0.5, 0.6))


def test_scaling_to_a_rate_stretches_or_compresses() -> None:
    trace = Trace("t", tuple(TraceRequest(float(i), 1, 1) for i in range(11)))  # 1 request/s
    scaled = scale(trace, Scaling(rate_rps=4.0))
    assert scaled.duration_s == pytest.approx(2.5)
    assert scaled.notes == ("arrival times multiplied by 0.25, to 4 requests/s",)
    assert scale(trace, Scaling(keep=0.999, rate_rps=4.0)).duration_s == pytest.approx(2.5)
    with pytest.raises(ValueError, match="one of the two"):
        Scaling(rate_rps=4.0, time_scale=2.0)
    with pytest.raises(TraceError, match="no rate"):
        scale(Trace("t", (TraceRequest(0.0, 1, 1),)), Scaling(rate_rps=4.0))


def test_statistics_of_a_known_trace() -> None:
    requests = [TraceRequest(float(i), 100 * (i % 4 + 1), 10, (1, 2 + i % 2), "ab"[i % 2]) for i in range(120)]
    summary = summarise(Trace("t", tuple(requests), 50.0))
    assert summary.requests == 120
    assert summary.mean_rps == pytest.approx(1.0)
    assert summary.gap_cv == pytest.approx(0.0)
    assert summary.peak_rps == {"1": 1.0, "10": 1.0, "60": 1.0}
    assert summary.dispersion == pytest.approx({"1": 0.0, "10": 0.0, "60": 0.0})
    assert summary.prompt == {"p50": 250, "p90": 400, "p95": 400, "p99": 400, "mean": 250, "max": 400}
    assert summary.sources == 2
    # All but two second blocks and one first block are hits; what lies behind two blocks is each request's own.
    assert summary.hit_ratio == pytest.approx((120 * 100 - 50 - 50 - 50) / 30_000)
    alone = summarise(Trace("t", (TraceRequest(0.0, 5, 5),)))
    assert (alone.mean_rps, alone.gap_cv, alone.hit_ratio) == (None, None, None)


def test_a_storm_in_the_last_part_of_a_window_is_counted() -> None:
    """One request every 2 s for 60 s, then 50 within half a second: the busiest second and ten, and no calm trace."""
    calm = [TraceRequest(2.0 * i, 10, 10) for i in range(30)]
    storm = [TraceRequest(62.0 + 0.01 * i, 10, 10) for i in range(50)]
    summary, without = (summarise(Trace("t", tuple(requests))) for requests in ([*calm, *storm], calm))
    assert summary.peak_rps["1"] == 50.0
    assert summary.peak_rps["10"] == 5.3
    assert summary.dispersion["10"] > 20 * max(0.1, without.dispersion["10"])


def test_one_wrong_date_takes_no_memory() -> None:
    """A row without its time among others of today: half a century of empty windows."""
    requests = (TraceRequest(0.0, 10, 10), *(TraceRequest(1.7e9 + i, 10, 10) for i in range(4)))
    tracemalloc.start()
    summary = summarise(Trace("t", requests))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
    assert summary.dispersion["1"] == pytest.approx(1.0)  # at most one in a window: variance is mean


def test_a_storm_across_two_windows_is_one() -> None:
    storm = [TraceRequest(9.5 + 0.1 * i, 10, 10) for i in range(10)]
    quiet = [TraceRequest(0.0, 10, 10), TraceRequest(40.0, 10, 10)]
    requests = sorted([*quiet, *storm], key=lambda request: request.arrival_s)
    assert summarise(Trace("t", tuple(requests))).peak_rps["1"] == 10.0
