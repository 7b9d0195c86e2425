"""The simulator against a live engine: under a live run's step times and arrivals it decides everything the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from engine.admission import AdmissionError
from engine.cache_manager import CacheManager
from engine.clock import RealClock
from engine.core import EngineCore
from engine.core_options import CoreOptions
from engine.core_stats import CoreStats
from engine.events import Event, ListSink
from engine.loader import LoadedModel, load_model
from engine.model_runner import ModelRunner
from engine.models.random_model import write_random_model
from engine.request import CachePolicy, SamplingParams
from engine.scheduler import Scheduler
from engine.stats import Counters
from engine.tunable_state import Patch
from engine.tunables import TUNABLES, default_values
from envs.arrivals_feed import TraceFeed
from envs.latency_model import LatencyModel
from envs.sim_request import SimRequest
from envs.simulator import Executor, SimOptions, Simulator
from envs.step_recording import PlaybackRunner, RecordedStep, RecordingRunner
from envs.virtual_clock import VirtualClock
from envs.workload.trace import TraceRequest, from_requests
from kernels import ops

CONFIG = {
    "architectures": ["MistralForCausalLM"], "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 10000.0, "eos_token_id": 3,
}  # fmt: skip
TIMES = {"step_time_ns", "prefill_time_ns", "decode_time_ns", "recode_time_ns", "recompute_time_ns"}
KNOBS = ("kv_format", "block_size", "eviction", "keep_tokens", "max_num_seqs", "max_num_batched_tokens")
SIZES = {"recent_tokens": 32, "sinks": 16, "watermark": 0.01}

SLAB_BYTES = 256 * 2 * 2 * 16 * 4  # 256 tokens of K and V in two layers of one head

Command = tuple[str, Any]
Script = dict[int, list[Command]]


@pytest.fixture(scope="module", params=[None, 96], ids=["full", "window"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = write_random_model(tmp_path_factory.mktemp("model"), {**CONFIG, "sliding_window": request.param}, seed=1)
    return load_model(folder)


@dataclass
class Run:
    """What happened: events without their stamps, books at the end, and the runner's record."""

    events: list[Event]
    counters: Counters
    blocks: list[Any]
    outputs: dict[str, list[int]]
    steps: list[RecordedStep] = field(default_factory=list)


def write_script(seed: int) -> Script:
    """Turn -> commands: arrivals that share beginnings, cancellations, changes of knobs."""
    rng = random.Random(seed)
    script: Script = {}
    documents = [[rng.randrange(4, 64) for _ in range(200)] for _ in range(3)]
    for number in range(40):
        turn = rng.randrange(90)
        shared = rng.choice(documents)[: rng.choice((0, 16, 100, 200))]
        prompt = shared + [rng.randrange(4, 64) for _ in range(rng.choice((1, 7, 60)))]
        params = SamplingParams(
            max_tokens=rng.choice((1, 20, 130)), temperature=rng.choice((0.0, 1.0)), seed=number,
            ignore_eos=rng.random() < 0.5,
        )  # fmt: skip
        policy = CachePolicy(
            kv_format_floor=rng.choice((None, None, None, "int8")), allow_eviction=rng.random() < 0.8,
            use_prefix_cache=rng.random() < 0.8, salt=rng.choice(("", "", "a")),
        )  # fmt: skip
        script.setdefault(turn, []).append(("add", (f"r{number}", prompt, params, policy)))
        if rng.random() < 0.2:
            script.setdefault(turn + rng.randrange(40), []).append(("abort", f"r{number}"))
    for _ in range(12):
        knob = rng.choice(KNOBS)
        change = ("patch", Patch({knob: rng.choice(TUNABLES[knob].values)}, "test"))
        script.setdefault(rng.randrange(150), []).append(change)
    evict: dict[str, object] = {"eviction": "window", "keep_tokens": TUNABLES["keep_tokens"].values[0]}
    script.setdefault(80, []).append(("patch", Patch(evict, "test")))
    return script


def play(core: EngineCore, script: Script, add: Callable[..., None], turn: Callable[[], None]) -> None:
    for number in range(10_000):
        for kind, what in script.get(number, ()):
            if kind == "add":
                add(*what)
            elif kind == "abort":
                core.abort(what)
            else:
                core.patch(what)
        if core.has_work:
            turn()
        elif core.has_background_work:
            core.background()
        elif number > max(script):
            return
    raise AssertionError("it never ends")


def blocks_of(cache: CacheManager) -> list[Any]:
    return [
        [(b.offset, b.block_class, b.first, b.filled, sorted(b.nodes.items()), b.last_used) for b in p.blocks.values()]
        for p in cache._pools
    ]


def without_times(sink: ListSink) -> list[Event]:
    return [replace(event, stamp_ns=0) for event in sink.events]


def live(loaded: LoadedModel, script: Script, pool_bytes: int) -> Run:
    clock, counters, sink, values = RealClock(), Counters(), ListSink(), default_values()
    cache = CacheManager(loaded.groups, pool_bytes, values, clock=clock, events=sink, counters=counters, **SIZES)
    scheduler = Scheduler(
        cache, values, max_model_len=400, max_waiting=18, clock=clock, counters=counters, events=sink,
        eos_token_ids=loaded.eos_token_ids, recode_tokens_per_step=128,
    )  # fmt: skip
    sizes = [cache.group_arena_bytes(group) for group in range(len(loaded.groups))]
    runner = RecordingRunner(ModelRunner(loaded, sizes, ops, rng=random.Random(1)), clock)
    options = CoreOptions("live", "live", 400, idle_recode_tokens=256)
    core = EngineCore(scheduler, cache, runner, values, clock, options=options, stats=CoreStats(counters))
    outputs: dict[str, list[int]] = {}

    def add(name: str, prompt: list[int], params: SamplingParams, policy: CachePolicy) -> None:
        request = SimRequest(name, prompt, params, clock.now_ns(), cache=policy)
        outputs[name] = request.output_ids
        try:
            core.add(request)
        except AdmissionError:
            outputs[name] = []

    play(core, script, add, core.step)
    return Run(without_times(sink), counters, blocks_of(cache), outputs, runner.steps)


def simulated(
    loaded: LoadedModel, script: Script, pool_bytes: int, record: list[RecordedStep]
) -> tuple[Run, list[int]]:
    clock, sink = VirtualClock(), ListSink()
    runner = PlaybackRunner(record, clock)
    options = SimOptions(
        pool_bytes,
        400,
        max_waiting=18,
        recode_budget_tokens=128,
        idle_recode_tokens=256,
        **SIZES,  # type: ignore[arg-type]
    )
    nothing = TraceFeed(from_requests("none", [TraceRequest(1.0, 1, 1)]))
    simulator = Simulator(
        loaded.groups, LatencyModel({}), options, nothing, events=sink, executor=Executor(runner, clock),
        eos_token_ids=loaded.eos_token_ids,
    )  # fmt: skip
    outputs: dict[str, list[int]] = {}

    def add(name: str, prompt: list[int], params: SamplingParams, policy: CachePolicy) -> None:
        request = SimRequest(name, prompt, params, clock.now_ns(), cache=policy)
        outputs[name] = request.output_ids if simulator.submit(request) else []

    play(simulator.core, script, add, simulator.step)
    simulator.cache.check_integrity()
    run = Run(without_times(sink), simulator.stats().counters, blocks_of(simulator.cache), outputs)
    return run, runner.differing


@pytest.mark.parametrize("seed", range(6))
def test_every_decision_is_the_live_engines(loaded: LoadedModel, seed: int) -> None:
    script = write_script(seed)
    pool_bytes = SLAB_BYTES * (3 + 2 * (seed % 3))
    real = live(loaded, script, pool_bytes)
    run, differing = simulated(loaded, script, pool_bytes, real.steps)
    assert differing == []
    assert run.counters.steps == real.counters.steps
    assert run.events == real.events
    assert run.outputs == real.outputs
    assert run.blocks == real.blocks
    for name, value in vars(real.counters).items():
        if name not in TIMES:
            assert getattr(run.counters, name) == value, name
    kinds = {type(event).__name__ for event in real.events}
    assert {"RequestAdded", "RequestAdmitted", "RequestFinished", "StepScheduled", "TunablesApplied"} <= kinds
    assert run.counters.prefix_cache_hits == real.counters.prefix_cache_hits


def test_scripts_bring_about_everything_there_is(loaded: LoadedModel) -> None:
    kinds: set[str] = set()
    hits = 0
    for seed in range(3):
        pool_bytes = SLAB_BYTES * (3 + 2 * (seed % 3))
        real = live(loaded, write_script(seed), pool_bytes)
        kinds |= {type(event).__name__ for event in real.events}
        hits += real.counters.prefix_cache_hits
    expected = {"RequestPreempted", "BlocksRecoded", "PrefixBlocksDropped", "RequestRejected"}
    if all(group.window is None for group in loaded.groups):
        expected.add("TokensEvicted")  # behind a short window of the model's own there is nothing left to evict
    assert expected <= kinds
    assert hits


def test_another_decision_is_noticed(loaded: LoadedModel) -> None:
    """The same record under another budget of tokens: the first long prompt is cut elsewhere."""
    script = write_script(1)
    real = live(loaded, script, SLAB_BYTES * 8)
    other = {**script, 0: [("patch", Patch({"max_num_batched_tokens": 64}, "test")), *script.get(0, [])]}
    run, differing = simulated(loaded, other, SLAB_BYTES * 8, [*real.steps, *real.steps])
    assert differing
    assert run.events != real.events
