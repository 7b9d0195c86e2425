"""KV in host memory through the real model and its runner: where it lies changes no bit and loses no token."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.clock import ManualClock
from engine.loader import LoadedModel, load_model
from engine.memory_model import slab_bytes
from engine.models.random_model import write_random_model
from engine.offline import OfflineEngine
from engine.plan import StepPlan
from engine.request import CachePolicy, FinishReason, RequestStatus, SamplingParams
from engine.step_draft import StepDraft
from engine.transfers import HostLink
from kernels import ops

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "use_sliding_window": True,
    "sliding_window": 50,
    "max_window_layers": 2,
}
NEW_TOKENS = 30
RATE = 1e8


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = tmp_path_factory.mktemp("host") / "model"
    return load_model(write_random_model(folder, CONFIG, seed=5, deviation=0.15), dtype=request.param)


def prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(2)
    return [[rng.randrange(128) for _ in range(length)] for length in lengths]


def engine_of(loaded: LoadedModel, slabs: int, host_slabs: int, **values: Any) -> OfflineEngine:
    size = sum(slab_bytes(group.shape, 256) for group in loaded.groups)
    clock = ManualClock()
    return OfflineEngine(
        loaded,
        pool_bytes=slabs * size,
        values={"max_num_batched_tokens": 64, "host_offload": "on" if host_slabs else "off", **values},
        recent_tokens=32,
        clock=clock,
        host_pool_bytes=host_slabs * size,
        link=HostLink(RATE, RATE) if host_slabs else None,
        staging_bytes=20 * size if host_slabs else 0,
        pause=clock.advance_s,
    )


def stored(engine: OfflineEngine) -> list[Tensor]:
    """Keys and values of every running request and layer, in position order."""
    tensors = []
    for request in engine.scheduler.running:
        for number, group in enumerate(engine.loaded.groups):
            entries = engine.cache.entries(request, number)
            rows = torch.tensor([[e.offset, e.format_code, e.first, e.valid] for e in entries], dtype=torch.int32)
            arenas = (engine.runner.arenas[number], engine.streamer._hosts[number] if engine.streamer else None)
            for layer in range(group.shape.num_layers):
                parts = [
                    ops.gather_kv(
                        arenas[entry.on_host], group.shape, layer, row[None], 1, native_dtype=engine.loaded.model.dtype
                    )
                    for entry, row in zip(entries, rows, strict=True)
                ]
                tensors += [torch.cat(part) for part in zip(*parts, strict=True)]
    return tensors


def drain(engine: OfflineEngine) -> None:
    """Let all copies be made that can be."""
    assert engine.mover is not None
    while engine.cache.num_transfers or engine.cache.has_transfer_plans():
        engine.mover.submit(engine.cache.plan_transfers())
        engine._pause(0.01)
        engine.cache.finish_transfers(engine.mover.arrived())
    engine.cache.check_integrity()


def out_and_back(engine: OfflineEngine, *, stream: bool = False) -> int:
    """Park every running request until all of it is on the host, and bring it back; bytes moved out.

    ``stream``: bring back only the blocks that are not full.
    """
    before = engine.cache.counters.host_out_bytes
    running = list(engine.scheduler.running)
    for request in running:
        engine.scheduler._preemptor.preempt(request, StepDraft(0))
    drain(engine)
    usage = engine.cache.usage()
    assert usage.used_bytes == 0
    for arena in engine.runner.arenas:
        arena.fill_(0xAA)  # what comes back does so from the host
    while engine.scheduler._queues.preempted:
        request, host = engine.scheduler._queues.preempted[0], engine.cache.host
        assert host is not None
        if stream:
            sequence = engine.cache._by_request[request.request_id]
            assert host.begin_load(sequence, keep_slabs=1, room=[0] * len(engine.cache.groups))
            engine.scheduler._planner._admitter.wait_for_load(request, was_parked=True)
        else:
            assert engine.scheduler._planner._admitter.admit_next(StepDraft(0))
    assert list(engine.scheduler.loading) == running
    drain(engine)
    return engine.cache.counters.host_out_bytes - before


def record(engine: OfflineEngine, *, move: bool, stream: bool = False) -> list[list[Tensor]]:
    steps: list[list[Tensor]] = []
    model = engine.loaded.model
    original = model.logits
    current: list[Tensor] = []
    moved = 0

    def spy(hidden: Tensor) -> Tensor:
        logits = original(hidden)
        current.append(logits.clone())
        return logits

    def after(_plan: StepPlan) -> None:
        nonlocal moved
        steps.append([*current, *stored(engine)])
        current.clear()
        if move and engine.scheduler.running:
            moved += out_and_back(engine, stream=stream)

    model.logits = spy  # type: ignore[method-assign]
    try:
        for prompt in prompts(340, 37, 5, 96):
            engine.add(prompt, SamplingParams(max_tokens=NEW_TOKENS))
        engine.run(after)
    finally:
        model.logits = original  # type: ignore[method-assign]
    assert bool(moved) == move
    return steps


@pytest.mark.parametrize("values", [{}, {"kv_format": "int4", "block_size": 64}])
def test_moving_everything_out_and_back_at_every_step_changes_no_bit(
    loaded: LoadedModel, values: dict[str, Any]
) -> None:
    plain = record(engine_of(loaded, 40, 40, **values), move=False)
    moved = record(engine_of(loaded, 40, 40, **values), move=True)
    assert len(plain) == len(moved) > NEW_TOKENS
    for step, (expected, found) in enumerate(zip(plain, moved, strict=True)):
        assert len(expected) == len(found), step
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), step


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"kv_format": "int4", "block_size": 64},
        {"kv_format": "k8v4"},
        {"eviction": "heavy_hitter", "keep_tokens": 128, "block_size": 64},  # chosen by attention over streamed tiles
    ],
)
def test_streaming_everything_at_every_step_changes_no_bit(
    loaded: LoadedModel, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = record(engine_of(loaded, 40, 40, **values), move=False)
    engine = engine_of(loaded, 40, 40, **values)
    monkeypatch.setattr(engine.cache.host.streams, "promotions", lambda: iter(()))
    monkeypatch.setattr(engine.cache.host.cost, "stream_bytes", lambda: 1 << 30)
    streamed = record(engine, move=True, stream=True)
    assert engine.cache.counters.host_streamed_bytes > 0
    assert len(plain) == len(streamed) > NEW_TOKENS
    for step, (expected, found) in enumerate(zip(plain, streamed, strict=True)):
        assert len(expected) == len(found), step
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), step


def test_case_d13_swapped_requests_give_the_same_tokens(loaded: LoadedModel) -> None:
    if loaded.model.dtype != torch.float32:
        pytest.skip("across batch shapes only float32 keeps ids")
    params = SamplingParams(max_tokens=120, ignore_eos=True)
    roomy = engine_of(loaded, 40, 0)
    expected = [roomy.add(prompt, params, policy=CachePolicy(use_prefix_cache=False)) for prompt in prompts(*[200] * 6)]
    roomy.run()
    tight = engine_of(loaded, 4, 12)
    found = [tight.add(prompt, params, policy=CachePolicy(use_prefix_cache=False)) for prompt in prompts(*[200] * 6)]

    def after(_plan: StepPlan) -> None:
        tight.cache.check_integrity()
        tight._pause(0.0005)  # the step took as long

    tight.run(after)
    counters = tight.cache.counters
    assert counters.swapped_out == counters.swapped_in >= 2
    assert counters.recomputed_tokens == 0
    for one, other in zip(expected, found, strict=True):
        assert one.output_ids == other.output_ids
        assert other.finish_reason is FinishReason.LENGTH


def test_an_evicted_sequence_goes_on_with_what_it_kept(loaded: LoadedModel) -> None:
    """Computed again it would attend to what was dropped, and say something else."""
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    values = {"eviction": "window", "keep_tokens": 128}
    outputs = []
    for move in (False, True):
        engine = engine_of(loaded, 40, 40, **values)
        result = engine.add(prompts(400)[0], params)
        engine.run(
            lambda _plan, engine=engine, move=move: out_and_back(engine) if move and engine.scheduler.running else 0
        )
        assert result.request.num_evicted_tokens > 0
        assert result.request.num_recomputed_tokens == 0
        outputs.append(result.output_ids)
    assert outputs[0] == outputs[1]


def test_a_prefix_on_the_host_gives_what_it_gave_on_the_device(loaded: LoadedModel) -> None:
    params = SamplingParams(max_tokens=10)
    engine = engine_of(loaded, 4, 30)
    first, *others = prompts(*[300] * 8)
    cold = engine.add(first, params)
    engine.run()
    drain(engine)
    for other in others:
        engine.add(other, params)
        engine.run()
        drain(engine)
    warm = engine.add(first, params)
    engine.run()
    assert warm.request.num_cached_tokens == 288
    assert engine.cache.counters.host_hit_tokens > 0
    assert warm.request.status is RequestStatus.FINISHED
    assert warm.output_ids == cold.output_ids
