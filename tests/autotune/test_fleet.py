"""``autotune fleet`` over a fake Prometheus that is fed with the real pages of daemons and engines."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from autotune.adapters.find import KINDS
from autotune.fleet.names import NAMES
from autotune.fleet.prometheus import Prometheus, PrometheusError, Series
from autotune.fleet.read import read_fleet
from autotune.fleet.rows import last_decision
from autotune.fleet.view import table
from autotune.metrics import DaemonMetrics, Snapshot
from engine.stats import EngineStats

NOW_S = 1_800_000_000.0


class FakePrometheus:
    """Holds targets' pages and answers the four queries of the fleet, by name as the real one does."""

    def __init__(self) -> None:
        self.pages: dict[tuple[str, str], str | None] = {}  # by job and instance; None: down
        self.labels: dict[tuple[str, str], dict[str, str]] = {}
        self.history: list[dict[str, Any]] = []
        self.lately: list[dict[str, Any]] = []
        self.answer: tuple[int, bytes] | None = None
        self.asked: list[str] = []
        self.headers: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                size = int(self.headers["content-length"])
                query = parse_qs(self.rfile.read(size).decode())
                outer.asked.append(query["query"][0])
                outer.headers.append(self.headers.get("authorization", ""))
                status, body = outer.answer or (200, json.dumps(outer.reply(query["query"][0])).encode())
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def reply(self, query: str) -> dict[str, Any]:
        if query == "time()":
            return {"status": "success", "data": {"resultType": "scalar", "result": [NOW_S, str(NOW_S)]}}
        if query == "up":
            return vector([
                {"metric": {"__name__": "up", **self.names(target)}, "value": [NOW_S, "0" if page is None else "1"]}
                for target, page in self.pages.items()
            ])  # fmt: skip
        if query.startswith("last_over_time(autotune_ticks_total"):
            return vector(self.lately + self.samples(re.compile("autotune_ticks_total")))
        if query.endswith("s]"):
            assert query.startswith('{__name__=~"autotune_decisions_total|autotune_ticks_total",verdict=~"'), query
            return {"status": "success", "data": {"resultType": "matrix", "result": self.history}}
        found = re.fullmatch(r'\{__name__=~"([^"]+)"\}', query)
        assert found is not None, query
        return vector(self.samples(re.compile(found[1])))

    def names(self, target: tuple[str, str]) -> dict[str, str]:
        return {"job": target[0], "instance": target[1], **self.labels.get(target, {})}

    def samples(self, wanted: re.Pattern[str]) -> list[dict[str, Any]]:
        rows = []
        for target, page in self.pages.items():
            for family in text_string_to_metric_families(page or ""):
                for sample in family.samples:
                    if wanted.fullmatch(sample.name):
                        metric = {"__name__": sample.name, **sample.labels, **self.names(target)}
                        rows.append({"metric": metric, "value": [NOW_S, str(sample.value)]})
        return rows


def vector(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"status": "success", "data": {"resultType": "vector", "result": rows}}


@pytest.fixture
def prometheus() -> Iterator[FakePrometheus]:
    server = FakePrometheus()
    yield server
    server.close()


def page_of(rig: Any) -> str:
    """The daemon's own page."""
    registry: CollectorRegistry = rig.registry
    return generate_latest(registry).decode()


@pytest.fixture
def daemon_page(make_rig: Any) -> str:
    rig = make_rig("targets: {ttft_s: 0.1, tbt_s: 0.1}\n")
    rig.engine.serve_requests(5)
    rig.run_s(3)
    rig.engine.serve_requests(5, ttft_s=0.5)
    rig.run_s(3)
    return page_of(rig)


def rows(prometheus: FakePrometheus) -> dict[str, Any]:
    with Prometheus(prometheus.url) as server:
        return {row.name: row for row in read_fleet(server)}


def test_a_row_says_what_the_daemon_says(prometheus: FakePrometheus, daemon_page: str) -> None:
    prometheus.pages[("autotune", "a:9466")] = daemon_page
    row = rows(prometheus)["a:9466"]
    assert (row.daemon, row.health, row.mode) == ("up", "ok", "active")
    assert (row.kv_format, row.kv_shares, row.kv_usage) == ("native", {"native": 1.0}, pytest.approx(0.1))
    assert (row.running, row.waiting) == (8, 0)
    assert row.ttft_target_s == 0.1
    assert row.ttft_s > 0.1
    assert row.misses == ["ttft"]
    assert row.is_well


def test_every_name_that_is_asked_for_exists() -> None:
    """Names of our own daemon and engine are those of their pages."""
    from autotune.docs import daemon_families
    from engine.metrics import documentation

    ours = {family.name for family in daemon_families()} | {name for name, _, _ in documentation()}
    assert {name for name in NAMES if name.startswith("autotune_")} <= ours


def test_unknown_stays_unknown(prometheus: FakePrometheus, make_rig: Any) -> None:
    rig = make_rig("")
    rig.engine.alive = False
    rig.run_s(3)
    prometheus.pages[("autotune", "a:9466")] = page_of(rig)
    row = rows(prometheus)["a:9466"]
    assert (row.daemon, row.health, row.is_well) == ("up", "gone", False)
    assert row.load is row.kv_usage is row.ttft_s is row.running is row.kv_format is None
    cells = [str(column._cells[0]) for column in table([row]).columns]
    assert cells[3:9] == ["?", "?", "?", "?/?", "?", "?"]
    prometheus.pages[("autotune", "a:9466")] = 'autotune_mode{mode="off"} 1\nautotune_load NaN\n'
    row = rows(prometheus)["a:9466"]
    assert (row.mode, row.load, row.health) == ("off", None, "unknown")


def test_a_daemon_that_is_down_is_a_row(prometheus: FakePrometheus) -> None:
    prometheus.pages[("autotune", "a:9466")] = None
    metric = {"job": "autotune", "instance": "a:9466"}
    prometheus.lately.append({"metric": metric, "value": [NOW_S, "17"]})
    row = rows(prometheus)["a:9466"]
    assert (row.daemon, row.health, row.is_well, row.load) == ("down", "unknown", False, None)
    prometheus.labels[("autotune", "a:9466")] = prometheus.labels[("engine", "a:8000")] = {"fleet_name": "a"}
    metric["fleet_name"] = "a"
    prometheus.pages[("engine", "a:8000")] = "autotune_engine_load 0.5\nautotune_engine_num_requests_running 3\n"
    (row,) = rows(prometheus).values()  # the engine serves on, and says so itself
    assert (row.name, row.daemon, row.health, row.is_well, row.load, row.running) == ("a", "down", "ok", False, 0.5, 3)
    assert row.waiting is row.kv_usage is None


def test_engines_without_a_daemon_and_with_one(prometheus: FakePrometheus, daemon_page: str) -> None:
    vllm = (
        'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5\n'
        'vllm:gpu_cache_usage_perc{engine="0",model_name="m"} 0.9\n'
        'vllm:num_requests_running{engine="0",model_name="m"} 3\n'
        'vllm:num_requests_waiting{engine="1",model_name="m"} 2\n'
    )
    prometheus.pages[("vllm", "b:8000")] = vllm
    prometheus.pages[("vllm", "c:8000")] = vllm
    prometheus.pages[("autotune", "c:9466")] = daemon_page
    for target in (("vllm", "c:8000"), ("autotune", "c:9466")):
        prometheus.labels[target] = {"pod": "vllm-0", "namespace": "prod"}
    found = rows(prometheus)
    assert list(found) == ["b:8000", "b:8000 engine 1", "prod/vllm-0"]
    bare = found["b:8000"]
    assert (bare.daemon, bare.health, bare.kv_usage, bare.running, bare.waiting) == ("none", "ok", 0.5, 3, None)
    assert (found["b:8000 engine 1"].running, found["b:8000 engine 1"].waiting) == (None, 2)
    assert found["prod/vllm-0"].daemon == "up"  # of its engine there is no second row
    prometheus.labels = {target: {"fleet_name": "c"} for target in prometheus.labels}
    assert list(rows(prometheus)) == ["b:8000", "b:8000 engine 1", "c"]


def test_which_name_counts_does_not_hang_on_their_order(prometheus: FakePrometheus) -> None:
    new, old = 'vllm:kv_cache_usage_perc{engine="0"} 0.5\n', 'vllm:gpu_cache_usage_perc{engine="0"} 0.9\n'
    for page in (new + old, old + new):
        prometheus.pages[("vllm", "b:8000")] = page
        assert rows(prometheus)["b:8000"].kv_usage == 0.5


def test_ranks_of_one_engine_are_told_apart_and_counted_once(prometheus: FakePrometheus) -> None:
    """SGLang: its label of data parallelism is another one, and tensor ranks repeat what the first one tells."""
    prometheus.pages[("sglang", "s:30000")] = "".join(
        f'sglang:num_running_reqs{{dp_rank="{rank}",tp_rank="{copy}"}} {10 * copy + rank + 1}\n'
        for rank in (0, 1)
        for copy in (1, 0)
    )
    found = rows(prometheus)
    assert {name: row.running for name, row in found.items()} == {"s:30000": 1, "s:30000 dp_rank 1": 2}
    prometheus.pages = {("sglang", "s:30000"): 'sglang:num_running_reqs{tp_rank="1"} 5\n'}
    assert rows(prometheus) == {}
    down = {"job": "autotune", "instance": "s:9466", "fleet_name": "s"}
    prometheus.lately.append({"metric": down, "value": [NOW_S, "17"]})
    prometheus.pages[("autotune", "s:9466")] = None
    prometheus.labels = {target: {"fleet_name": "s"} for target in prometheus.pages}
    (row,) = rows(prometheus).values()
    assert (row.daemon, row.running) == ("down", None)


@pytest.mark.parametrize(
    ("kind", "knobs", "expected"),
    [
        ("vllm", {"kv-cache-dtype": "fp8", "block-size": 16}, "fp8"),
        ("llamacpp", {"cache-type-k": "q8_0", "cache-type-v": "q8_0"}, "q8_0"),
        ("llamacpp", {"cache-type-k": "f16", "cache-type-v": "q4_0"}, "f16/q4_0"),
        ("vllm", {}, None),
    ],
)
def test_how_engines_of_another_make_store(
    prometheus: FakePrometheus, kind: str, knobs: dict[str, Any], expected: str | None
) -> None:
    registry = CollectorRegistry()
    metrics = DaemonMetrics(registry, KINDS[kind].tunables)
    reading = EngineStats("i", "m", 1, 4096, 64, 0, knobs)
    metrics.snapshot = Snapshot(mode="active", reading=reading)
    prometheus.pages[("autotune", "a:9466")] = generate_latest(registry).decode()
    row = rows(prometheus)["a:9466"]
    assert row.kv_format == expected
    assert str(table([row]).columns[5]._cells[0]) == (expected or "?")


def decision(knob: str, to: str, samples: list[tuple[float, float]], verdict: str = "applied") -> Series:
    labels = {"__name__": "autotune_decisions_total", "knob": knob, "to": to, "verdict": verdict, "scenario": "s"}
    return Series({**labels, "writer": "autotune"}, samples)


def test_the_last_decision_is_the_latest_rise() -> None:
    ticks = Series({"__name__": "autotune_ticks_total"}, [(0, 1), (60, 61)])
    old = decision("kv_format", "int8", [(0, 1), (15, 1), (30, 2), (45, 2)])
    new = decision("block_size", "64", [(45, 1), (60, 1)])  # begins later than its daemon: decided then
    refused = decision("eviction", "window", [(0, 0), (60, 5)], verdict="dwell")
    last = last_decision([ticks, old, new, refused], 100)
    assert last is not None
    assert (last.knob, last.to, last.age_s) == ("block_size", "64", 55)
    last = last_decision([ticks, old, refused], 100)
    assert last is not None
    assert (last.knob, last.age_s) == ("kv_format", 70)
    steady = decision("kv_format", "int8", [(0, 3), (60, 3)])
    assert last_decision([ticks, steady], 100) is None  # long ago
    restarted = decision("kv_format", "int8", [(0, 3), (30, 3), (45, 1)])  # with its daemon, and has decided since
    last = last_decision([ticks, restarted], 50)
    assert last is not None
    assert last.age_s == 5
    assert last_decision([], 0) is None


def test_the_command(autotune: Any, prometheus: FakePrometheus, daemon_page: str, tmp_path: Any) -> None:
    where = ("fleet", "--prometheus", prometheus.url)
    code, out, _ = autotune(*where)
    assert (code, "knows no engine" in out) == (1, True)
    prometheus.pages[("autotune", "a:9466")] = daemon_page
    labels = {"job": "autotune", "instance": "a:9466", "knob": "kv_format", "to": "int8", "scenario": "scarce"}
    values = [[NOW_S - 100, "1"], [NOW_S - 40, "2"]]
    prometheus.history = [{"metric": {**labels, "verdict": "converging", "writer": "autotune"}, "values": values}]
    code, out, err = autotune(*where)
    assert (code, err) == (0, "")
    (line,) = [line for line in out.splitlines() if line.startswith("a:9466")]
    assert "kv_format int8 (scarce), 40 s ago" in line
    assert " of 100 ms!" in line
    assert out.splitlines()[-1] == "1 engine(s); all well; over target: a:9466"
    token = tmp_path / "token"
    token.write_text("secret\n")
    document = json.loads(autotune(*where, "--json", "--token-file", str(token))[1])
    assert document[0]["last_decision"]["age_s"] == 40
    assert document[0]["misses"] == ["ttft"]
    assert prometheus.headers[-1] == "Bearer secret"


def test_watch_looks_again(
    autotune: Any, prometheus: FakePrometheus, daemon_page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    prometheus.pages[("autotune", "a:9466")] = daemon_page
    code, out, _ = autotune("fleet", "--prometheus", prometheus.url, "--watch", "--every", "7", "--json")
    assert (code, looks, len(out.splitlines())) == (130, [7.0, 7.0], 2)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((200, b"<html>"), "no JSON"),
        ((200, b"[]"), "status 200"),
        ((400, b'{"status":"error","error":"bad query"}'), "status 400 bad query"),
        ((401, b"{}"), "status 401"),
        ((200, b'{"status":"success","data":{"resultType":"vector","result":[{}]}}'), "is this a Prometheus"),
        ((200, b'{"status":"success","data":{"resultType":"scalar","result":null}}'), "is this a Prometheus"),
        ((200, b'{"status":"success","data":{"resultType":"matrix","result":3}}'), "is this a Prometheus"),
        ((200, b'{"status":"success","data":{"result":[1e999,"1"]}}'), "does not tell its time"),
        ((200, b'{"status":"success","data":{"result":[1,' + b"9" * 400 + b"]}}"), "does not tell its time"),
        ((200, b"[" * 100_000), "no JSON"),
    ],
)
def test_what_is_no_prometheus(
    autotune: Any, prometheus: FakePrometheus, answer: tuple[int, bytes], words: str
) -> None:
    prometheus.answer = answer
    code, out, err = autotune("fleet", "--prometheus", prometheus.url)
    assert (code, out, len(err.splitlines())) == (1, "", 1)
    assert words in err
    with Prometheus(prometheus.url) as server, pytest.raises(PrometheusError):
        server.instant("up")


@pytest.mark.parametrize(
    ("code", "words", "arguments"),
    [
        (1, "no Prometheus answers", ["--prometheus", "http://127.0.0.1:1"]),
        (1, "must be an http address", ["--prometheus", "prometheus:9090"]),
        (1, "no address", ["--prometheus", "http://[::1"]),
        (1, "--token-file", ["--token-file", "/nope"]),
        (2, "--every", ["--every", "0"]),
        (2, "--every", ["--every", "nan"]),
    ],
)
def test_mistakes_are_one_line(autotune: Any, code: int, words: str, arguments: list[str]) -> None:
    result = autotune("fleet", *arguments)
    assert (result[0], result[1], len(result[2].splitlines())) == (code, "", 1)
    assert words in result[2]


def test_samples_that_are_no_numbers(prometheus: FakePrometheus) -> None:
    prometheus.lately.append({"metric": {"job": "a"}, "value": ["now", "x"]})
    with Prometheus(prometheus.url) as server, pytest.raises(PrometheusError, match="no numbers"):
        read_fleet(server)
