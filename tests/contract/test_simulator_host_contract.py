"""The simulator against a live engine with a host tier: under its times and copy completions it decides everything the
same.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from engine.cache_manager import CacheManager
from engine.clock import RealClock
from engine.core import CoreOptions, EngineCore
from engine.core_stats import CoreStats
from engine.events import Event, ListSink
from engine.links import EmulatedMover, host_arenas
from engine.loader import LoadedModel, load_model
from engine.model_runner import ModelRunner
from engine.models.random_model import write_random_model
from engine.request import SamplingParams
from engine.scheduler import Scheduler
from engine.stats import Counters
from engine.streaming import EmulatedStreamer
from engine.transfers import HostLink
from engine.tunable_state import Patch
from engine.tunables import TUNABLES, default_values
from envs.arrivals_feed import TraceFeed
from envs.latency_model import LatencyModel
from envs.sim_request import SimRequest
from envs.simulator import Executor, SimOptions, Simulator
from envs.step_recording import (
    PlaybackClock,
    PlaybackMover,
    PlaybackRunner,
    RecordedStep,
    RecordingClock,
    RecordingMover,
    RecordingRunner,
)
from envs.workload.trace import TraceRequest, from_requests
from kernels import ops

CONFIG = {
    "architectures": ["MistralForCausalLM"], "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 10000.0, "eos_token_id": 3, "sliding_window": None,
}  # fmt: skip
SLAB_BYTES = 256 * 2 * 2 * 16 * 4  # 256 tokens of K and V in two layers of one head
# Copies are under way for a step or a few of this tiny model, and moving KV is about as fast as computing it.
LINK = HostLink(1e8, 1e8)
KNOBS = ("kv_format", "block_size", "host_offload", "max_num_seqs")
SIZES: dict[str, Any] = {"recent_tokens": 32, "sinks": 16, "watermark": 0.01}
OFFLOAD = {"host_offload": "on"}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(write_random_model(tmp_path_factory.mktemp("model"), CONFIG, seed=1))


@dataclass
class Recorded:
    """What a live run leaves for its simulation."""

    steps: list[RecordedStep]
    readings: list[int]
    submitted: list[str]
    arrivals: list[tuple[int, ...]]


@dataclass
class Run:
    """What happened, with its stamps."""

    events: list[Event]
    counters: Counters
    blocks: list[Any]
    outputs: dict[str, list[int]]
    differing: list[int] = field(default_factory=list)


def write_script(seed: int) -> dict[int, list[tuple[str, Any]]]:
    """Turn -> commands: sessions that come back to their documents, cancellations, changes of knobs."""
    rng = random.Random(seed)
    script: dict[int, list[tuple[str, Any]]] = {}
    documents = [[rng.randrange(4, 64) for _ in range(240)] for _ in range(4)]
    for number in range(40):
        turn = rng.randrange(10) * 40
        prompt = rng.choice(documents)[: rng.choice((100, 200, 240))] + [
            rng.randrange(4, 64) for _ in range(rng.choice((1, 7, 60)))
        ]
        most = rng.choice((1, 60, 130))
        params = SamplingParams(max_tokens=most, temperature=0.0, seed=number, ignore_eos=rng.random() < 0.5)
        script.setdefault(turn, []).append(("add", (f"r{number}", prompt, params)))
        if rng.random() < 0.2:
            script.setdefault(turn + rng.randrange(200), []).append(("abort", f"r{number}"))
    for _ in range(10):
        knob = rng.choice(KNOBS)
        change = Patch({knob: rng.choice(TUNABLES[knob].values)}, "test")
        script.setdefault(rng.randrange(400), []).append(("patch", change))
    for turn in (100, 250):
        script.setdefault(turn, []).append(("patch", Patch({**OFFLOAD}, "test")))
    return script


def play(core: EngineCore, clock: Any, script: dict[int, list[tuple[str, Any]]]) -> dict[str, list[int]]:
    outputs: dict[str, list[int]] = {}
    for number in range(1_000_000):
        for kind, what in script.get(number, ()):
            if kind == "add":
                name, prompt, params = what
                request = SimRequest(name, prompt, params, clock.now_ns())
                outputs[name] = request.output_ids
                core.add(request)
            elif kind == "abort":
                core.abort(what)
            else:
                core.patch(what)
        if core.has_work:
            core.step()
        elif core.has_background_work:
            core.background()
        elif number > max(script):
            return outputs
    raise AssertionError("it never ends")


def books(cache: CacheManager) -> list[Any]:
    """Every block of both tiers that is left."""
    return [
        [(b.tier, b.offset, b.block_class, b.first, b.filled, sorted(b.nodes.items())) for b in pool.blocks.values()]
        for device in cache._pools
        for pool in (device, device.host)
        if pool is not None
    ]


def live(loaded: LoadedModel, script: dict[int, list[tuple[str, Any]]], options: SimOptions) -> tuple[Run, Recorded]:
    real, counters, sink = RealClock(), Counters(), ListSink()
    clock, values = RecordingClock(real), {**default_values(), **options.values}
    cache = CacheManager(
        loaded.groups, options.pool_bytes - options.staging_bytes, values, clock=clock, events=sink, counters=counters,
        host_pool_bytes=options.host_pool_bytes, link=LINK, staging_bytes=options.staging_bytes, **SIZES,
    )  # fmt: skip
    scheduler = Scheduler(
        cache, values, max_model_len=400, max_waiting=64, clock=clock, counters=counters, events=sink,
        eos_token_ids=loaded.eos_token_ids, recode_tokens_per_step=128,
    )  # fmt: skip
    groups = range(len(loaded.groups))
    model = ModelRunner(loaded, [cache.group_arena_bytes(g) for g in groups], ops, rng=random.Random(1))
    hosts = host_arenas([cache.group_host_bytes(g) for g in groups], loaded.model.device)
    emulated = EmulatedMover(model.arenas, hosts, LINK, real, ops.copy_bytes)
    streamer = EmulatedStreamer(model.arenas, hosts, emulated.line, real, ops.copy_bytes, pause=lambda _: None)
    model.stream_with(streamer, cache.stream_places())
    runner, mover = RecordingRunner(model, real), RecordingMover(emulated)
    core = EngineCore(
        scheduler, cache, runner, values, clock, options=CoreOptions("live", "live", 400, idle_recode_tokens=256),
        stats=CoreStats(counters), mover=mover,
    )  # fmt: skip
    outputs = play(core, clock, script)
    record = Recorded(runner.steps, clock.readings, mover.submitted, mover.arrivals)
    return Run(sink.events, counters, books(cache), outputs), record


def simulated(
    loaded: LoadedModel, script: dict[int, list[tuple[str, Any]]], options: SimOptions, record: Recorded
) -> Run:
    clock, sink = PlaybackClock(record.readings), ListSink()
    runner = PlaybackRunner(record.steps, clock)
    mover = PlaybackMover(LINK, record.submitted, record.arrivals)
    nothing = TraceFeed(from_requests("none", [TraceRequest(1.0, 1, 1)]))
    simulator = Simulator(
        loaded.groups, LatencyModel({}), options, nothing, events=sink, executor=Executor(runner, clock, mover),
        eos_token_ids=loaded.eos_token_ids,
    )  # fmt: skip
    outputs = play(simulator.core, clock, script)
    simulator.cache.check_integrity()
    counters = simulator.scheduler.counters
    differing = [*runner.differing, *mover.differing]
    assert runner.next_step == len(record.steps)
    assert clock.next_reading == len(record.readings)
    assert mover.next_look == len(record.arrivals)
    return Run(sink.events, counters, books(simulator.cache), outputs, differing)


def options_of(seed: int) -> SimOptions:
    slabs = 5 + 2 * (seed % 3)
    return SimOptions(
        SLAB_BYTES * slabs, 400, values={"host_offload": "on"}, max_waiting=64, recode_budget_tokens=128,
        idle_recode_tokens=256, host_pool_bytes=SLAB_BYTES * (4 + 16 * (seed % 2)), host_link=LINK, **SIZES,
    )  # fmt: skip


def test_every_decision_is_the_live_engines(loaded: LoadedModel) -> None:
    seen = Counters()
    for seed in (0, 1, 3, 4):
        script, options = write_script(seed), options_of(seed)
        real, record = live(loaded, script, options)
        run = simulated(loaded, script, options, record)
        assert run.differing == []
        assert run.events == real.events
        assert run.outputs == real.outputs
        assert run.blocks == real.blocks
        assert run.counters == real.counters
        for name, value in vars(real.counters).items():
            setattr(seen, name, getattr(seen, name) + value)
    # Everything that a host tier does has been done.
    assert seen.swapped_out
    assert seen.swapped_in
    assert seen.host_out_bytes
    assert seen.host_in_bytes
    assert seen.host_hit_tokens
    assert seen.preemptions
    assert seen.requests_aborted


def test_a_copy_that_arrives_at_another_moment_is_noticed(loaded: LoadedModel) -> None:
    script, options = write_script(1), options_of(1)
    _, record = live(loaded, script, options)
    first = next(index for index, numbers in enumerate(record.arrivals) if numbers)
    arrivals = [*record.arrivals]
    arrivals[first], arrivals[first + 40] = (), (*arrivals[first], *arrivals[first + 40])
    try:
        run = simulated(loaded, script, options, replace(record, arrivals=arrivals))
    except (IndexError, AssertionError):
        return  # it took more or fewer steps
    assert run.differing
