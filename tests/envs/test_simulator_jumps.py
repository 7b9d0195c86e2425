"""Jumps over uneventful decode steps change nothing: every event, block, counter and figure is that of stepping."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.events import ListSink
from engine.formats import KVShape
from engine.memory_model import GroupSpec
from engine.transfers import HostLink
from engine.tunable_state import Patch
from engine.tunables import TUNABLES
from envs.arrivals_feed import TraceFeed
from envs.latency_model import LatencyModel
from envs.ledger import Ledger, RequestRecord
from envs.signals import Targets
from envs.sim_request import SimRequest
from envs.simulated_runner import Jitter
from envs.simulator import SimOptions, Simulator
from envs.workload.trace import TraceRequest, from_requests

MODEL = LatencyModel(
    {
        "step": 1.2e-3, "prefill_token": 9e-6, "decode_sequence": 4e-5, "token_beyond_knee": 3e-6,
        "prefill_pair": 3e-10, "decode_kv_native": 3e-8, "decode_kv_int8": 2e-8, "decode_kv_k8v4": 1.7e-8,
        "decode_kv_int4": 1.1e-8, "decode_block": 4e-7, "sample": 2e-6, "recode": 1e-5, "recode_native_int8": 1e-8,
        "recode_native_int4": 2e-8, "chunk_step": 3e-4, "regrouped": 4e-5, "after_chunk": 8e-7,
    },
    knee_tokens=4,
)  # fmt: skip
KNOBS = ("kv_format", "block_size", "eviction", "keep_tokens", "max_num_seqs", "max_num_batched_tokens")
LINK = HostLink(2e8, 2e8, copy_s=1e-5)


def groups_of(number: int) -> list[GroupSpec]:
    shape = KVShape(2, 1, 8, 2)
    return [GroupSpec(f"g{i}", (2 * i, 2 * i + 1), shape) for i in range(number)]


def random_trace(rng: random.Random) -> Any:
    """Prompts that share beginnings, arriving in clumps; sometimes nothing for a while."""
    requests, at = [], 0.0
    for _ in range(rng.randint(3, 30)):
        at += rng.choice((0.0, 0.001, 0.02, 0.3))
        prompt = rng.choice((1, 5, 16, 40, 100, 250))
        ids = tuple(rng.choice((7, 100 + i)) + 10 * i for i in range(prompt // 16)) if rng.random() < 0.7 else ()
        requests.append(TraceRequest(at, prompt, rng.choice((1, 2, 15, 33, 70, 200)), ids))
    return from_requests("random", requests, block_tokens=16)


def build(
    rng: random.Random, trace: Any, *, jump: bool, jitter: float
) -> tuple[Simulator, ListSink, list[RequestRecord]]:
    sink, records = ListSink(), []  # type: ignore[var-annotated]
    groups = groups_of(rng.choice((1, 1, 2)))
    has_host = rng.random() < 0.3
    slabs = sum(group.shape.block_bytes(kind, 256) for group in groups for kind in (native(),))
    options = SimOptions(
        pool_bytes=slabs * rng.randint(4 if has_host else 3, 12),
        max_model_len=400,
        values={
            "kv_format": rng.choice(("native", "native", "int8", "int4")),
            "block_size": rng.choice((16, 16, 32, 64)),
            "eviction": rng.choice(("none", "none", "window", "heavy_hitter")),
            "keep_tokens": TUNABLES["keep_tokens"].values[0],
            "max_num_seqs": rng.choice((2, 8, 64)),
            "max_num_batched_tokens": rng.choice((64, 512)),
            "host_offload": rng.choice(("off", "on")) if has_host else "off",
        },
        max_waiting=rng.choice((3, 256)),
        recent_tokens=rng.choice((0, 32)),
        recode_budget_tokens=rng.choice((0, 64, 512)),
        recode_share=rng.choice((0.0, 0.0, 0.15)),
        actuation_delay_s=rng.choice((0.0, 0.013)),
        patience_s=rng.choice((None, None, 0.2)),
        prefix_cache=rng.random() < 0.7,
        jump=jump,
        jitter=Jitter(jitter, 3),
        host_pool_bytes=slabs * rng.randint(2, 8) if has_host else 0,
        host_link=LINK,
    )
    ledger = Ledger(Targets(0.05, 0.004), records.append)
    return Simulator(groups, MODEL, options, TraceFeed(trace), ledger=ledger, events=sink), sink, records


def native() -> Any:
    from engine.formats import NATIVE

    return NATIVE


def disturb(simulator: Simulator, rng: random.Random) -> None:
    """Change a knob, or hang up, at a few moments."""
    for _ in range(rng.randint(0, 8)):
        simulator.run_until(simulator.now_ns + rng.choice((1, 10**6, 37_000_000, 400_000_000)))
        if rng.random() < 0.3:
            simulator.cancel(str(rng.randrange(20)), simulator.now_ns + rng.randrange(10**8))
        else:
            knob = rng.choice((*KNOBS, "host_offload") if simulator.cache.host is not None else KNOBS)
            simulator.apply(Patch({knob: rng.choice(TUNABLES[knob].values)}, "test"))
    simulator.drain(300.0)


def outcome(seed: int, *, jump: bool, jitter: float = 0.0) -> tuple[Simulator, ListSink, list[RequestRecord]]:
    rng = random.Random(seed)
    trace = random_trace(rng)
    simulator, sink, records = build(rng, trace, jump=jump, jitter=jitter)
    disturb(simulator, rng)
    simulator.cache.check_integrity()
    return simulator, sink, records


def same(seed: int, jitter: float = 0.0) -> int:
    """How many steps the workload took, if both ways agree."""
    (stepped, step_sink, step_records), (jumped, jump_sink, jump_records) = (
        outcome(seed, jump=jump, jitter=jitter) for jump in (False, True)
    )
    assert jump_sink.events == step_sink.events
    assert jump_records == step_records
    assert jumped.now_ns == stepped.now_ns
    one, other = jumped.stats().to_json(), stepped.stats().to_json()
    for name in ("ttft", "itl", "e2e", "queue", "prompt_lengths", "output_lengths"):
        # Sums of floats depend on the order of addition in their last bits; everything else is whole numbers.
        assert one[name].pop("sum_s") == pytest.approx(other[name].pop("sum_s"), rel=1e-9), name
    assert one == other
    assert blocks(jumped) == blocks(stepped)
    true, expected = jumped.ledger.take(), stepped.ledger.take()
    assert true.quality_charge == pytest.approx(expected.quality_charge, rel=1e-9)
    true.quality_charge = expected.quality_charge = 0.0
    assert true == expected
    return int(one["counters"]["steps"])


def blocks(simulator: Simulator) -> list[Any]:
    """Every block that is left, idle ones in the order in which they would be given up."""
    return [
        [(b.offset, b.block_class, b.first, b.filled, sorted(b.nodes), b.last_used) for b in pool.blocks.values()]
        + [b.offset for b in pool.idle]
        for pool in simulator.cache._pools
    ]


@given(st.integers(0, 2**32 - 1))
@example(1243571)  # the host tier is switched off in a stretch of plain steps, and what it cached is dropped
@settings(max_examples=60, deadline=None)
def test_jumping_is_stepping(seed: int) -> None:
    same(seed)


@pytest.mark.slow
def test_jumping_is_stepping_on_a_thousand_workloads() -> None:
    steps = sum(same(seed) for seed in range(1000))
    print(f"1000 workloads, {steps} steps")


def test_jumping_is_stepping_with_uneven_step_times() -> None:
    for seed in range(5):
        same(seed, jitter=0.3)


def test_runs_are_taken_where_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lone request of 200 tokens: one prefill step is planned, and next to nothing after it."""
    planned = 0
    requests = [TraceRequest(0.0, 40, 200)]
    simulator = Simulator(
        groups_of(1),
        MODEL,
        SimOptions(1 << 20, 400),
        TraceFeed(from_requests("one", requests)),
        ledger=Ledger(Targets()),
    )
    schedule = simulator.scheduler.schedule

    def counted() -> Any:
        nonlocal planned
        planned += 1
        return schedule()

    monkeypatch.setattr(simulator.scheduler, "schedule", counted)
    simulator.drain()
    assert simulator.stats().counters.steps == 200
    assert planned == 1
    assert simulator.ledger.figures.completed == 1


def test_a_run_stops_at_the_first_boundary_after_its_limit() -> None:
    trace = from_requests("one", [TraceRequest(0.0, 40, 200)])
    whole = Simulator(groups_of(1), MODEL, SimOptions(1 << 20, 400), TraceFeed(trace))
    whole.run_until(50_000_000)
    assert 50_000_000 <= whole.now_ns < 53_000_000
    request = next(iter(whole._live.values()))
    assert isinstance(request, SimRequest)
    assert request.num_computed_tokens == 40 + len(request.output_ids) - 1
