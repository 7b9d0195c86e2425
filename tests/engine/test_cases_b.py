"""Cases of section B with a real model: what a prefix hit may give after a live switch, against a cold run.

Recoding is synchronous. Every switch is made twice: with the prefix on the device, and with all of it on the host.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention_mass import OBSERVED_PROMPT_TOKENS
from engine.clock import ManualClock
from engine.loader import LoadedModel, load_model
from engine.memory_model import slab_bytes
from engine.models.random_model import write_random_model
from engine.offline import OfflineEngine, OfflineResult
from engine.request import RequestStatus, SamplingParams
from engine.transfers import HostLink
from kernels.layout import BLOCK_SIZES, FORMAT_BY_NAME, FORMATS, NATIVE, NATIVE_TILE_TOKENS, OFFSET_UNIT

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
LENGTH, RECENT = 400, 32
HIT = (LENGTH - 1) // 16 * 16


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = tmp_path_factory.mktemp("cases") / "model"
    return load_model(write_random_model(folder, CONFIG, seed=3, deviation=0.25), dtype="float32")


@dataclass
class Run:
    """A prompt's result, and the formats of its older KV after its first step and after its last but one."""

    result: OfflineResult
    first: set[str]
    last: set[str]


Move = Callable[[OfflineEngine], None]


def engine_of(loaded: LoadedModel, values: dict[str, Any]) -> OfflineEngine:
    slab = sum(slab_bytes(group.shape, 256) for group in loaded.groups)
    clock = ManualClock()
    return OfflineEngine(
        loaded,
        pool_bytes=24 * slab,
        values={"max_num_batched_tokens": 64, "host_offload": "on", **values},
        recent_tokens=RECENT,
        clock=clock,
        host_pool_bytes=48 * slab,
        link=HostLink(1e8, 1e8),
        pause=clock.advance_s,
    )


def stay(_engine: OfflineEngine) -> None:
    """Leave prefixes where they are."""


def to_host(engine: OfflineEngine) -> None:
    """Every cached block is on the host alone; what the device held is overwritten."""
    assert engine.mover is not None
    while engine.cache.num_transfers or engine.cache.has_transfer_plans():
        engine.mover.submit(engine.cache.plan_transfers())
        engine._pause(0.01)
        engine.cache.finish_transfers(engine.mover.arrived())
    engine.cache.drop_idle()
    engine.cache.check_integrity()
    assert engine.cache.usage().cached_bytes == engine.cache.usage().used_bytes == 0
    for arena in engine.runner.arenas:
        arena.fill_(0xAA)


@pytest.fixture(params=[stay, to_host], ids=["device", "host"])
def move(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Move:
    """What becomes of idle prefixes before the next request."""
    # Usually only as much is copied ahead as may be needed soon.
    monkeypatch.setattr("engine.host_departures._FREE_SHARE", 2.0)
    chosen: Move = request.param
    return chosen


def hits_on_host(engine: OfflineEngine) -> int:
    return engine.cache.counters.host_hit_tokens


def send(engine: OfflineEngine, prompt: list[int], max_tokens: int = 6) -> Run:
    result = engine.add(prompt, SamplingParams(max_tokens=max_tokens, logprobs=20))
    seen: list[set[str]] = []

    def look(_plan: object) -> None:
        engine.cache.check_integrity()
        if result.request.status is RequestStatus.RUNNING:
            entries = engine.cache.entries(result.request, 0)
            seen.append({FORMATS[entry.format_code].name for entry in entries if entry.first < HIT - RECENT - 256})

    engine.run(look)
    return Run(result, seen[0], seen[-1])


def prompt_of(seed: int = 5) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(64) for _ in range(LENGTH)]


def assert_same(found: OfflineResult, cold: OfflineResult, tolerance: float) -> None:
    assert found.output_ids == cold.output_ids
    for one, two in zip(found.logprobs, cold.logprobs, strict=True):
        assert one.logprob == pytest.approx(two.logprob, abs=tolerance)


def distance(one: Run, two: Run) -> float:
    """Mean difference of the first token's log-probabilities, over the likeliest tokens that both report."""
    first, second = (dict(run.result.logprobs[0].top) for run in (one, two))
    common = first.keys() & second.keys()
    assert len(common) >= 12
    return sum(abs(first[token] - second[token]) for token in common) / len(common)


SWITCHES = [(a, b) for a in FORMAT_BY_NAME for b in FORMAT_BY_NAME if a != b]


@pytest.mark.parametrize(("before", "after"), SWITCHES)
def test_a_hit_after_a_format_switch_gives_what_a_cold_run_gives(
    loaded: LoadedModel, before: str, after: str, move: Move
) -> None:
    """LMCache/LMCache#1856: KV of the old format serves only where it is no lossier, and is converted at once.

    A lossier one is no hit, and the output is a cold run's. A milder one is a hit, no farther from native than a cold
    run at the new setting is (the step that takes it up still reads it as it was).
    """
    settings = {"kv_format": after, "block_size": 32}
    cold = send(engine_of(loaded, settings), prompt_of())
    engine = engine_of(loaded, {**settings, "kv_format": before})
    old = send(engine, prompt_of())
    assert old.last == {before}
    move(engine)
    engine.apply(kv_format=after)
    new = send(engine, prompt_of())
    assert new.last == {after}
    if FORMAT_BY_NAME[before].lossiness > FORMAT_BY_NAME[after].lossiness:
        assert new.result.request.num_cached_tokens == 0
        assert_same(new.result, cold.result, 1e-6)
        # This tells a hit from none: what the lossy blocks would have given is something else.
        assert distance(old, new) > 1e-4
    else:
        assert new.result.request.num_cached_tokens == HIT
        assert hits_on_host(engine) == (HIT if move is to_host else 0)
        assert new.first == {after}
        native = send(engine_of(loaded, {"block_size": 32}), prompt_of())
        errors = distance(new, native), distance(cold, native)
        print(f"{before} to {after}: distance to native {errors[0]:.5f} for the hit, {errors[1]:.5f} cold")
        assert errors[0] <= errors[1] + 1e-3


@pytest.mark.parametrize("kv_format", ["native", "int8"])
def test_a_hit_after_a_block_size_switch_gives_what_a_cold_run_gives(
    loaded: LoadedModel, kv_format: str, move: Move
) -> None:
    """LMCache/LMCache#1856 for block sizes: every size after every other, the whole prompt a hit each time."""
    prompt = prompt_of()
    cold = {
        size: send(engine_of(loaded, {"block_size": size, "kv_format": kv_format}), prompt).result
        for size in BLOCK_SIZES
    }
    engine = engine_of(loaded, {"block_size": 16, "kv_format": kv_format})
    send(engine, prompt)
    order = [16, 64, 16, 256, 32, 128, 64, 256, 128, 16, 32, 256, 16]
    for count, size in enumerate(order, start=1):
        move(engine)
        engine.apply(block_size=size)
        found = send(engine, prompt)
        assert hits_on_host(engine) == (count * HIT if move is to_host else 0)
        assert found.result.request.num_cached_tokens == HIT
        # Over int8 a hit computes its last tokens over converted KV, where a cold run had some of it native still.
        if kv_format == "native":
            assert_same(found.result, cold[size], 1e-4)
        else:
            close = found.result.logprobs[0].logprob
            assert close == pytest.approx(cold[size].logprobs[0].logprob, abs=0.02)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"eviction": "none"}, {"eviction": "window", "keep_tokens": 128}),
        ({"eviction": "window", "keep_tokens": 128}, {"eviction": "none"}),
        ({"eviction": "window", "keep_tokens": 128}, {"eviction": "window", "keep_tokens": 256}),
        ({"eviction": "window", "keep_tokens": 256}, {"eviction": "window", "keep_tokens": 128}),
        (
            {"eviction": "window", "keep_tokens": 128, "block_size": 256},
            {"eviction": "window", "keep_tokens": 256, "block_size": 32},
        ),
        (
            {"eviction": "window", "keep_tokens": 256, "block_size": 16},
            {"eviction": "window", "keep_tokens": 128, "block_size": 128},
        ),
        ({"eviction": "none"}, {"eviction": "heavy_hitter", "keep_tokens": 128}),
        ({"eviction": "heavy_hitter", "keep_tokens": 128}, {"eviction": "none"}),
        (
            {"eviction": "window", "keep_tokens": 128, "block_size": 64},
            {"eviction": "heavy_hitter", "keep_tokens": 128, "block_size": 256},
        ),
        (
            {"eviction": "heavy_hitter", "keep_tokens": 256, "block_size": 256},
            {"eviction": "heavy_hitter", "keep_tokens": 128, "block_size": 16},
        ),
    ],
)
def test_a_hit_after_an_eviction_switch_gives_what_a_cold_run_gives(
    loaded: LoadedModel, before: dict[str, Any], after: dict[str, Any], move: Move
) -> None:
    """LMCache/LMCache#1856 for eviction policies: also for a follow-up of an answer that was computed with gaps."""
    engine = engine_of(loaded, before)
    old = send(engine, prompt_of(), max_tokens=50)
    follow = [*old.result.request.all_ids, *prompt_of(6)[:30]]
    move(engine)
    engine.apply(**after)
    for prompt, least in ((prompt_of(), HIT), (follow, HIT)):
        cold = send(engine_of(loaded, after), prompt)
        new = send(engine, prompt)
        cached = new.result.request.num_cached_tokens
        assert (hits_on_host(engine) > 0) == (move is to_host)
        observed = OBSERVED_PROMPT_TOKENS if after["eviction"] == "heavy_hitter" else 0
        assert cached >= least - observed
        assert cached <= LENGTH or before["eviction"] == "none"  # nothing that was computed over a gap
        assert_same(new.result, cold.result, 1e-4)
        assert new.result.request.evicted_chunks == cold.result.request.evicted_chunks
        assert new.result.request.num_evicted_tokens == cold.result.request.num_evicted_tokens


@pytest.mark.parametrize("shared", [17, 40, 64, 70, 100])
@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_a_block_that_comes_back_from_the_host_shows_nothing_past_what_is_shared(
    loaded: LoadedModel, block_size: int, shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """waybarrios/vllm-mlx#380 on the host: all of A but the chunks that B shares is NaN there, as is all else."""
    monkeypatch.setattr("engine.host_departures._FREE_SHARE", 2.0)
    long = prompt_of(1)[:150]
    short = [*long[:shared], (long[shared] + 1) % 64, *prompt_of(2)[:25]]
    cold = send(engine_of(loaded, {"block_size": block_size}), short, max_tokens=12)
    engine = engine_of(loaded, {"block_size": block_size})
    send(engine, long, max_tokens=12)
    to_host(engine)
    shape, (pool,) = loaded.groups[0].shape, engine.cache._pools
    assert engine.streamer is not None
    assert pool.host is not None
    (host,) = engine.streamer._hosts
    kept = torch.full_like(host, 255)
    for offset, block in pool.host.blocks.items():
        for tile in range(max(0, min(block.size, shared // 16 * 16 - block.first)) // NATIVE_TILE_TOKENS):
            start = offset * OFFSET_UNIT + tile * shape.tile_stride(NATIVE)
            kept[start : start + shape.tile_stride(NATIVE)] = host[start : start + shape.tile_stride(NATIVE)]
    host.copy_(kept)
    for arena in engine.runner.arenas:
        arena.fill_(255)
    found = send(engine, short, max_tokens=12)
    assert found.result.request.num_cached_tokens == hits_on_host(engine) == shared // 16 * 16
    assert_same(found.result, cold.result, 1e-4)
