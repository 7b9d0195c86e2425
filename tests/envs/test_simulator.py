"""The simulator's own parts: arrivals, clients, time, snapshots, and the same result in any process."""

from __future__ import annotations

import gc
import pickle
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from engine.formats import KVShape
from engine.memory_model import GroupSpec
from engine.tunable_state import Patch
from envs.arrivals_feed import StreamFeed, TraceFeed
from envs.latency_model import LatencyModel
from envs.ledger import Ledger, RequestRecord
from envs.signals import Targets
from envs.sim_request import make_request
from envs.simulator import SimOptions, Simulator
from envs.workload.catalogue import CATALOGUE
from envs.workload.generators import generate
from envs.workload.trace import Trace, TraceRequest, from_requests

GROUPS = [GroupSpec("full", (0, 1), KVShape(2, 1, 16, 2))]
MODEL = LatencyModel({"step": 1e-3, "prefill_token": 1e-5, "decode_sequence": 1e-4, "decode_kv_native": 1e-8})
SLAB = 256 * 2 * 16 * 2 * 2


def build(trace: Trace, records: list[RequestRecord] | None = None, **changes: Any) -> Simulator:
    options = SimOptions(**{"pool_bytes": SLAB * 20, "max_model_len": 1000, **changes})  # type: ignore[arg-type]
    ledger = Ledger(Targets(0.1, 0.005), None if records is None else records.append)
    return Simulator(GROUPS, MODEL, options, TraceFeed(trace), ledger=ledger)


def trace_of(*requests: tuple[float, int, int]) -> Trace:
    return from_requests("test", [TraceRequest(*request) for request in requests])


def test_one_request_takes_exactly_what_its_steps_cost() -> None:
    records: list[RequestRecord] = []
    simulator = build(trace_of((0.0, 100, 3)), records)
    simulator.drain()
    # Prefill: 1 ms and 100 x 10 us. Decoding: 1 ms, 0.1 ms, and 10 ns for each of 101 and 102 tokens in 2 layers.
    first, second, third = 2_000_000, 1_100_000 + 101 * 20, 1_100_000 + 102 * 20
    assert simulator.now_ns == first + second + third
    assert records[0].ttft_s == first / 1e9
    assert records[0].e2e_s == (first + second + third) / 1e9
    assert records[0].tpot_s == (second + third) / 2 / 1e9
    assert records[0].good


def test_idle_time_passes_without_steps() -> None:
    simulator = build(trace_of((0.0, 1, 1), (3600.0, 1, 1)))
    simulator.drain()
    assert simulator.now_ns > 3600 * 10**9
    assert simulator.stats().counters.steps == 2


def test_arrivals_wait_for_the_step_boundary_but_count_from_their_own_time() -> None:
    records: list[RequestRecord] = []
    simulator = build(trace_of((0.0, 500, 2), (0.001, 10, 1)), records)
    simulator.drain()
    late = next(record for record in records if record.index == 1)
    assert late.arrival_s == 0.001
    assert late.ttft_s is not None
    assert late.ttft_s > 0.005  # the first step takes 6 ms


def test_a_full_queue_refuses_and_counts() -> None:
    records: list[RequestRecord] = []
    burst = trace_of(*[(0.0, 400, 50)] * 30)
    simulator = build(burst, records, max_waiting=3, values={"max_num_seqs": 2})
    simulator.drain()
    figures, counters = simulator.ledger.figures, simulator.stats().counters
    assert figures.offered == counters.requests_offered == 30
    assert figures.rejected == counters.requests_rejected > 20
    assert figures.completed == counters.requests_completed == 30 - figures.rejected
    assert sum(record.status == "rejected" for record in records) == figures.rejected
    assert figures.violations >= figures.rejected


def test_clients_without_patience_hang_up() -> None:
    crowd = trace_of(*[(0.0, 500, 100)] * 20)
    simulator = build(crowd, patience_s=0.05)
    simulator.drain()
    figures = simulator.ledger.figures
    assert figures.aborted > 5
    assert figures.aborted + figures.completed == 20
    assert simulator.stats().counters.requests_aborted == figures.aborted
    assert max(figures.ttft_ns) <= 60_000_000
    simulator.cache.check_integrity()
    assert not simulator.scheduler.has_work


def test_a_cancelled_request_gives_back_what_it_holds() -> None:
    simulator = build(trace_of((0.0, 300, 400)), prefix_cache=False)
    simulator.cancel("0", 50_000_000)
    simulator.run_until(49_000_000)
    assert simulator.stats().gauges.kv_used_bytes > 0
    simulator.run_until(60_000_000)
    assert simulator.stats().gauges.kv_used_bytes == 0
    assert simulator.ledger.figures.aborted == 1


def test_changes_take_effect_after_the_delay_at_a_boundary() -> None:
    simulator = build(trace_of((0.0, 10, 500)), actuation_delay_s=0.02)
    simulator.run_until(10_000_000)
    assert simulator.apply(Patch({"kv_format": "int8"}, "test")) is None
    simulator.run_until(29_000_000)
    assert simulator.stats().effective["kv_format"] == "native"
    simulator.run_until(33_000_000)
    assert simulator.stats().effective["kv_format"] == "int8"


def test_prefix_hits_follow_the_hash_ids() -> None:
    records: list[RequestRecord] = []
    shared = [
        TraceRequest(0.0, 150, 2, (1, 2, 3)),
        TraceRequest(1.0, 150, 2, (1, 2, 4)),  # two blocks of 50: 100 tokens, in whole chunks 96
        TraceRequest(2.0, 150, 2, (9, 2, 3)),  # another beginning: nothing
        TraceRequest(3.0, 100, 2, (1, 2)),  # the last known token is never a hit
    ]
    simulator = Simulator(
        GROUPS, MODEL, SimOptions(SLAB * 20, 1000), TraceFeed(from_requests("shared", shared, block_tokens=50)),
        ledger=Ledger(Targets(), records.append),
    )  # fmt: skip
    simulator.drain()
    assert [record.cached_tokens for record in records] == [0, 96, 0, 96]
    assert simulator.stats().counters.prefix_cache_hits == 192


def test_prompts_share_nothing_but_what_the_trace_says() -> None:
    def ids(index: int, hash_ids: tuple[int, ...], length: int = 40) -> list[int]:
        source = TraceRequest(0.0, length, 5, hash_ids)
        return make_request(source, index, 0, 16, max_model_len=100, prefix_cache=True).prompt_ids

    assert ids(0, (1, 2))[:32] == ids(5, (1, 2))[:32]
    assert not set(ids(0, (1, 2))[32:]) & set(ids(5, (1, 2))[32:])
    assert not set(ids(0, (1,))) & set(ids(0, (-1,))[:16])
    assert not set(ids(0, ())) & set(ids(1, ()))
    request = make_request(TraceRequest(0.0, 500, 90), 3, 0, 0.0, max_model_len=100, prefix_cache=True)
    assert (len(request.prompt_ids), request.params.max_tokens) == (50, 50)
    assert request.token not in request.prompt_ids


# -- feeds ----------------------------------------------------------------------------------------------------------


def test_a_repeated_trace_goes_on_without_a_gap_or_a_clash() -> None:
    feed = TraceFeed(trace_of((0.0, 1, 1), (1.0, 2, 1), (2.0, 3, 1)), repeats=True)
    times = []
    for expected in range(7):
        times.append(feed.next_ns)
        index, request = feed.pop()
        assert index == expected
        assert request.prompt_tokens == expected % 3 + 1
    assert times == [number * 10**9 for number in range(7)]
    once = TraceFeed(trace_of((0.0, 1, 1)))
    once.pop()
    assert once.next_ns is None
    with pytest.raises(IndexError):
        once.pop()


def endless() -> Iterator[TraceRequest]:
    number = 0
    while True:
        yield TraceRequest(number * 0.5, 1 + number % 7, 2)
        number += 1


def first_ten() -> Iterator[TraceRequest]:
    return islice(endless(), 10)


def test_a_stream_is_never_held_and_a_copy_goes_on_where_it_was() -> None:
    feed = StreamFeed(endless)
    for _ in range(5):
        feed.pop()
    twin = pickle.loads(pickle.dumps(feed))
    assert [feed.pop() for _ in range(4)] == [twin.pop() for _ in range(4)]
    assert feed.next_ns == twin.next_ns == 4_500_000_000
    short = StreamFeed(first_ten)
    for _ in range(10):
        short.pop()
    assert short.next_ns is None
    assert pickle.loads(pickle.dumps(short)).next_ns is None


def test_memory_is_flat_however_long_it_runs() -> None:
    simulator = Simulator(GROUPS, MODEL, SimOptions(SLAB * 20, 1000), StreamFeed(endless), ledger=Ledger(Targets()))
    simulator.run_until(200 * 10**9)
    simulator.ledger.take()
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(10):
            simulator.run_until(simulator.now_ns + 200 * 10**9)
            simulator.ledger.take()
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 100_000
    finally:
        tracemalloc.stop()
    assert simulator.stats().counters.requests_completed > 4000


# -- state ----------------------------------------------------------------------------------------------------------


def outcome(simulator: Simulator) -> Any:
    simulator.drain()
    figures = simulator.ledger.figures
    return simulator.now_ns, simulator.stats().to_json(), figures.ttft_ns, figures.gaps, figures.quality_charge


def test_a_snapshot_brings_everything_back_as_often_as_asked() -> None:
    trace = generate(CATALOGUE["agent-shared-prefix"], duration_s=60, seed=1, rate_scale=2.0)
    simulator = build(trace, values={"kv_format": "int4"}, pool_bytes=SLAB * 12)
    simulator.run_until(20 * 10**9)
    snapshot = simulator.snapshot()
    first = outcome(simulator)
    simulator.restore(snapshot)
    simulator.cache.check_integrity()
    assert 20 * 10**9 <= simulator.now_ns < 21 * 10**9
    simulator.apply(Patch({"kv_format": "native"}, "test"))
    other = outcome(simulator)
    simulator.restore(snapshot)
    assert outcome(simulator) == first
    assert other != first


def test_two_simulators_of_one_feed_both_get_all_of_it() -> None:
    """Taking turns, as whoever compares two settings might; a feed that was begun goes on where it was."""
    trace = trace_of(*((0.1 * i, 20 + i, 5) for i in range(40)))
    for feed in (TraceFeed(trace), StreamFeed(lambda: trace.requests)):
        feed.pop()
        both = [Simulator(GROUPS, MODEL, SimOptions(SLAB * 12, 4000), feed) for _ in range(2)]
        for second in range(1, 6):
            for simulator in both:
                simulator.run_until(second * 10**9)
        assert [simulator.ledger.figures.completed for simulator in both] == [39, 39]
        assert both[0].stats() == both[1].stats()
        assert feed.next_ns == 10**8


SCRIPT = """
import sys, hashlib
sys.path[:0] = {path!r}
from tests_support import outcome, build, generate, CATALOGUE
trace = generate(CATALOGUE["chat-shared-prefix"], duration_s=40, seed=3)
simulator = build(trace, values={{"kv_format": "k8v4", "block_size": 64}}, max_model_len=4000)
print(hashlib.sha256(repr(outcome(simulator)).encode()).hexdigest())
"""


def test_two_processes_agree(tmp_path: Path) -> None:
    (tmp_path / "tests_support.py").write_bytes(Path(__file__).read_bytes())
    code = SCRIPT.format(path=[str(tmp_path), str(Path(__file__).parents[2])])
    found = [
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "77")
    ]
    assert found[0] == found[1]
    assert len(found[0]) == 65
