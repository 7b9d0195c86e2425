"""What is read off pages as engines of several versions serve them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.adapters.buckets import rebinned
from autotune.adapters.find import KINDS, adapter_of, kind_at
from autotune.adapters.http_engine import HttpEngine
from autotune.adapters.page import Page
from autotune.adapters.page import View as PageView
from autotune.adapters.reading import PartialStats
from autotune.adapters.web import Web
from autotune.collector import implausible
from engine.clock import ManualClock
from engine.control_client import EngineUnreachable
from envs.features import View
from envs.signals import Targets
from envs.spaces import observe
from envs.window import StatsWindow

PAGES = Path(__file__).parent / "pages"


class Reader:
    """Reads a recorded page through the adapter for it."""

    def __init__(self, server: Any) -> None:
        self.server = server

    def __call__(self, name: str) -> dict[str, PartialStats]:
        self.server.page = (PAGES / name).read_text()
        self.server.kind = name.partition("_")[0]
        found = adapter_of("auto", self.server.url, ManualClock()).read()
        assert all(isinstance(reading, PartialStats) for reading in found.values())
        return dict(found)  # type: ignore[arg-type]


@pytest.fixture
def read(fake_engines: Any) -> Iterator[Reader]:
    with fake_engines.FakeServer("vllm", {"kv-cache-dtype": "auto", "page-size": 1, "parallel": 4}) as server:
        yield Reader(server)


def test_vllm_as_recorded(read: Reader) -> None:
    (one,) = read("vllm_0.32_cpu.prom").values()
    assert (one.gauges.running, one.gauges.waiting, one.gauges.kv_usage) == (6, 2, 0.75)
    counters = one.counters
    assert (counters.requests_completed, counters.requests_aborted, counters.requests_failed) == (30, 3, 1)
    assert (counters.requests_rejected, counters.preemptions) == (5, 7)
    assert counters.requests_offered == 30 + 3 + 1 + 5 + 6 + 2
    assert (counters.prefix_cache_queries, counters.prefix_cache_hits) == (4000, 1000)
    assert (counters.prompt_tokens, counters.generation_tokens) == (4000, 2000)
    assert one.effective == {"kv-cache-dtype": "auto", "block-size": 32}
    assert one.capacity_tokens == 65536
    assert one.model == "tiny"
    assert one.ttft.count == 40
    assert one.ttft.share_within(0.25) == pytest.approx(24 / 40)
    assert one.ttft.share_within(1.0) == pytest.approx(38 / 40)
    assert 0.25 <= (one.ttft.quantile_s(0.8) or 0) <= 0.5
    assert one.decode_request_s == pytest.approx(39.2)
    assert 100 <= 1000 * (one.prompt_lengths.quantile_s(0.5) or 0) <= 200


def test_old_and_new_names_on_one_page_count_once(read: Reader) -> None:
    (one,) = read("vllm_0.9_both_names.prom").values()
    assert one.gauges.kv_usage == 0.4
    assert (one.counters.prefix_cache_queries, one.counters.prefix_cache_hits) == (100, 40)
    assert one.itl.count == 10
    assert one.decode_request_s == pytest.approx(0.2)
    assert one.capacity_tokens == 16_000
    assert one.effective == {"kv-cache-dtype": "fp8", "block-size": 16}


def test_old_names_alone_are_understood(read: Reader) -> None:
    (one,) = read("vllm_0.6_old_names.prom").values()
    assert (one.gauges.kv_usage, one.itl.count, one.counters.preemptions) == (0.4, 10, 2)
    assert one.counters.requests_completed is None
    assert one.counters.requests_offered is None, "arrivals cannot be added up without those that have ended"


def test_engines_on_one_page_are_kept_apart(read: Reader) -> None:
    found = read("vllm_two_engines.prom")
    assert list(found) == ["0", "1"]
    assert [one.gauges.running for one in found.values()] == [4, 9]
    assert [one.gauges.kv_usage for one in found.values()] == [0.2, 1.0]
    assert [one.counters.generation_tokens for one in found.values()] == [100, 300]
    assert len({one.instance for one in found.values()}) == 2
    assert [one.counters.requests_rejected for one in found.values()] == [None, None], "nobody can say whose they were"


def test_sglang_ranks_priorities_and_kinds_of_requests_count_once(read: Reader) -> None:
    (one,) = read("sglang_0.5.prom").values()
    assert (one.gauges.running, one.gauges.waiting, one.gauges.kv_usage) == (5, 3, 0.93)
    assert one.counters.preemptions == 12, "the gauge with the older name is of one batch"
    assert (one.counters.prompt_tokens, one.counters.generation_tokens) == (4000, 2000)
    assert (one.counters.prefix_cache_hits, one.counters.requests_completed) == (1000, 30)
    assert one.ttft.count == 30
    assert one.ttft.share_within(0.2) == pytest.approx(20 / 30)
    assert one.capacity_tokens == 50_000
    assert one.max_num_seqs == 64
    assert one.effective == {"kv-cache-dtype": "auto", "page-size": 1}


def test_llamacpp_as_recorded_tells_no_latency(read: Reader) -> None:
    (one,) = read("llamacpp_b11434.prom").values()
    assert (one.gauges.running, one.gauges.waiting, one.max_num_seqs) == (4, 2, 4)
    assert (one.counters.prompt_tokens, one.counters.generation_tokens) == (4000, 2000)
    assert (one.ttft, one.gauges.kv_usage, one.counters.requests_completed) == (None, None, None)
    assert one.decode_request_s == 40
    assert one.capacity_tokens == 4 * 512


def test_llamacpp_of_2024_told_the_use_of_its_cache(read: Reader) -> None:
    (one,) = read("llamacpp_2024.prom").values()
    assert one.gauges.kv_usage == 0.5


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        ("<html>no</html>", "not a Prometheus page"),
        ("", "no figure of a known engine"),
        ("# TYPE x gauge\nx NaN\n", "no figure of a known engine"),
        ("vllm:a 1\nsglang:b 1\n", "several engines"),
    ],
)
def test_what_is_no_page_of_a_known_engine_is_said(read: Reader, page: str, problem: str) -> None:
    read.server.page = page
    with pytest.raises(EngineUnreachable, match=problem):
        kind_at(Web(read.server.url))


def test_our_own_page_is_sent_to_the_daemon(read: Reader) -> None:
    read.server.page = "autotune_engine_steps_total 3\n"
    with pytest.raises(ValueError, match="autotune daemon"):
        kind_at(Web(read.server.url))


def test_a_page_that_has_no_number_for_a_figure_leaves_it_unknown() -> None:
    page = Page('a{x="1"} NaN\na{x="2"} 3\nb +Inf\n')
    assert [sample.value for sample in page.samples("a")] == [3]
    assert not page.samples("b")


def test_figures_that_add_up_to_more_than_there_is_are_unknown() -> None:
    view = PageView(Page('vllm:a 1.7e308\nvllm:a{b="c"} 1.7e308\nvllm:d 1\n'), "engine", "", alone=True, only={})
    assert view.total("vllm:a") is None
    assert view.total("vllm:d") == 1


def test_counts_never_fall_however_a_bucket_is_spread() -> None:
    before = [0] * 176
    for number in range(60):
        found = rebinned([(0.1, number), (1.0, 2 * number), (float("inf"), 2 * number + 1)], 1.0)
        assert found is not None
        assert found.count == 2 * number + 1
        assert all(now >= then for now, then in zip(found.counts, before, strict=True))
        before = found.counts
    assert sum(count > 0 for count in before) > 20, "spread, not heaped up"


@pytest.mark.parametrize(
    "buckets",
    [
        [],
        [(0.1, 3.0)],
        [(0.1, 3.0), (float("inf"), 2.0)],
        [(1.0, 1.0), (0.1, 2.0), (float("inf"), 3.0)],
        [(0.1, 1e300), (float("inf"), 1e300)],
        [(0.1, float("inf")), (float("inf"), float("inf"))],
        [(0.1, float("nan")), (float("inf"), 1.0)],
        [(0.1, -1.0), (float("inf"), 1.0)],
    ],
)
def test_a_histogram_that_cannot_be_true_is_unknown(buckets: list[tuple[float, float]]) -> None:
    assert rebinned(buckets, 1.0) is None


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://a", "http://"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="must be an address"):
        Web(url)


NAMES = (
    "vllm:num_requests_running",
    "vllm:kv_cache_usage_perc",
    "vllm:generation_tokens_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:time_to_first_token_seconds_sum",
    "vllm:cache_config_info",
    "process_start_time_seconds",
)
LINES = st.tuples(
    st.sampled_from(NAMES),
    st.dictionaries(
        st.sampled_from(("engine", "le", "block_size", "cache_dtype")), st.sampled_from(("0", "1", "x", ""))
    ),
    st.sampled_from(("0", "-1", "1e300", "NaN", "+Inf", "7", "x", "")),
)


def line(name: str, labels: dict[str, str], value: str) -> str:
    inside = ",".join(f'{key}="{text}"' for key, text in labels.items())
    return f"{name}{{{inside}}} {value}"


@given(st.lists(st.one_of(LINES.map(lambda parts: line(*parts)), st.text(max_size=30)), max_size=12))
def test_whatever_a_page_holds_it_is_read_or_refused(lines: list[str]) -> None:
    class Static(Web):
        def text(self, path: str) -> str:
            if path != "/metrics":
                raise EngineUnreachable(path)
            return "\n".join(lines) + "\n"

    try:
        found = HttpEngine(KINDS["vllm"], Static("http://127.0.0.1:1"), ManualClock()).read()
    except EngineUnreachable:
        return
    for reading in found.values():
        implausible(reading, None)
        observe(View(StatsWindow(None, reading), StatsWindow(None, reading), Targets()), stamp_ns=1, observed_s=0.0)
