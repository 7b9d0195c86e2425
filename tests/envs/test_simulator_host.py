"""The host tier in the simulator: the engine's own decisions over the emulated link's times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.formats import KVShape
from engine.memory_model import GroupSpec, slab_bytes
from engine.stats import Counters
from engine.transfers import Direction, HostLink
from engine.tunable_state import Patch
from envs.arrivals_feed import TraceFeed
from envs.latency_model import LatencyModel
from envs.offload import crossover_tokens
from envs.simulator import SimOptions, Simulator
from envs.workload.trace import Trace, TraceRequest, from_requests

SHAPE = KVShape(4, 1, 64, 2)
GROUPS = [GroupSpec("all", (0, 1, 2, 3), SHAPE)]
SLAB = slab_bytes(SHAPE, 256)
MODEL = LatencyModel({"step": 2e-3, "prefill_token": 1e-4, "decode_sequence": 1e-4})
LINK = HostLink(1e8, 1e8)


def simulator(
    trace: Trace, *, slabs: int = 8, host_slabs: int = 32, link: HostLink = LINK, on: bool = True
) -> Simulator:
    options = SimOptions(
        SLAB * slabs, 4096, values={"host_offload": "on" if on else "off", "max_num_batched_tokens": 512},
        host_pool_bytes=SLAB * host_slabs, host_link=link,
    )  # fmt: skip
    return Simulator(GROUPS, MODEL, options, TraceFeed(trace))


def crowd(number: int = 12, *, prompt: int = 160, output: int = 300) -> Trace:
    return from_requests("crowd", [TraceRequest(0.001 * i, prompt, output) for i in range(number)])


def sessions(turns: int = 4, clients: int = 8) -> Trace:
    """Clients in turn, each with a growing prefix of its own."""
    requests = []
    for turn in range(turns):
        for client in range(clients):
            ids = tuple(1000 * client + i for i in range(12 * (turn + 1)))
            requests.append(TraceRequest(1.0 * (turn * clients + client), 192 * (turn + 1), 8, ids))
    return from_requests("sessions", requests, block_tokens=16)


def after(engine: Simulator) -> Counters:
    engine.drain(600.0)
    assert engine.is_idle
    engine.cache.check_integrity()
    return engine.stats().counters


def test_preempted_sequences_are_swapped_and_nothing_is_lost() -> None:
    with_tier, without = after(simulator(crowd())), after(simulator(crowd(), on=False))
    assert with_tier.requests_completed == without.requests_completed == 12
    assert without.preemptions
    assert with_tier.swapped_in == with_tier.swapped_out > 0
    assert with_tier.prefill_tokens_computed < without.prefill_tokens_computed
    assert without.host_out_bytes == without.host_in_bytes == 0


def test_a_slow_link_is_not_used_for_what_is_sooner_computed() -> None:
    counters = after(simulator(crowd(), link=HostLink(1e5, 1e5)))
    assert counters.preemptions
    assert counters.swapped_out == 0


def test_prefixes_that_left_the_device_are_found_on_the_host() -> None:
    with_tier, without = after(simulator(sessions())), after(simulator(sessions(), on=False))
    assert with_tier.host_hit_tokens > 0
    assert with_tier.prefix_cache_hits > without.prefix_cache_hits


def test_time_passes_on_the_link_as_it_says() -> None:
    """A request whose prefix is on the host waits for exactly as long as the copies take, queued one after another."""
    engine = simulator(sessions())
    counters = after(engine)
    least_ns = LINK.copy_ns(Direction.IN, counters.host_in_bytes)
    assert counters.host_load_time_ns >= least_ns * 0.9
    slower = after(simulator(sessions(), link=replace(LINK, in_bytes_per_s=LINK.in_bytes_per_s / 4)))
    assert slower.host_load_time_ns / slower.host_loads > counters.host_load_time_ns / counters.host_loads


def test_running_sequences_stream_what_is_on_the_host() -> None:
    """Two that together do not fit: old blocks of one are streamed."""
    trace = from_requests("long", [TraceRequest(0.0, 700, 150), TraceRequest(0.0, 700, 150)])
    counters = after(simulator(trace, slabs=8, link=HostLink(1e9, 1e9)))
    assert counters.host_streamed_bytes > 0
    assert 0 < counters.host_stream_wait_ns < counters.step_time_ns
    assert counters.preemptions == 0


def test_switched_off_in_between_everything_comes_back() -> None:
    engine = simulator(crowd())
    engine.run_until(400_000_000)
    assert engine.stats().gauges.host_used_bytes > 0
    engine.apply(Patch({"host_offload": "off"}, "test"))
    counters = after(engine)
    assert counters.requests_completed == 12
    gauges = engine.stats().gauges
    assert gauges.host_used_bytes == gauges.host_cached_bytes == 0


def test_a_snapshot_has_the_copies_under_way() -> None:
    engine = simulator(crowd())
    while not engine.cache.num_transfers:
        engine.run_until(engine.now_ns + 1)
    snapshot, first = engine.snapshot(), after(engine).requests_completed
    end_ns = engine.now_ns
    engine.restore(snapshot)
    assert engine.cache.num_transfers
    assert after(engine).requests_completed == first
    assert engine.now_ns == end_ns


def test_idle_time_does_not_spin_while_copies_are_under_way() -> None:
    """Between arrivals nothing runs; copies of idle blocks go on, and time goes by them."""
    engine = simulator(sessions(turns=1, clients=3), slabs=5, link=HostLink(1e6, 1e6))
    engine.run_until(60 * 10**9)
    assert engine.now_ns == 60 * 10**9
    assert engine.cache.num_transfers == 0
    assert engine.stats().counters.host_out_bytes > 0


def test_without_a_host_pool_the_knob_is_refused() -> None:
    options = SimOptions(SLAB * 4, 4096)
    engine = Simulator(GROUPS, MODEL, options, TraceFeed(crowd(1)))
    outcome = engine.apply(Patch({"host_offload": "on"}, "test"))
    assert outcome is not None
    assert outcome.results["host_offload"].status == "rejected"
    with pytest.raises(ValueError, match="link"):
        Simulator(GROUPS, MODEL, replace(options, host_pool_bytes=SLAB), TraceFeed(crowd(1)))


def test_the_crossover_is_where_copying_takes_as_long_as_computing() -> None:
    per_token = 4 * 2 * 64 * 2
    # A token takes 100 us to compute and 1 us per 100 bytes to copy: with 50 ms per copy, 50 ms / (100 - 10.24) us.
    link = HostLink(1e8, 1e8, copy_s=0.05)
    found = crossover_tokens(GROUPS, LatencyModel({"step": 1e-3, "prefill_token": 1e-4}), link, 4096)
    assert found is not None
    exact = 0.05 / (1e-4 - per_token / 1e8)
    assert exact - 16 < found <= exact + 16
    assert crossover_tokens(GROUPS, LatencyModel({"prefill_token": 1e-6}), link, 4096) is None
