"""Public bug cases about block sizes and prefix reuse, run through the whole engine (sections B and C of the cases)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.loader import LoadedModel, load_model
from engine.memory_model import slab_bytes
from engine.models.random_model import write_random_model
from engine.offline import OfflineEngine, OfflineResult
from engine.plan import SequenceOutput, StepPlan
from engine.request import SamplingParams
from kernels.layout import BLOCK_SIZES, NATIVE, NATIVE_TILE_TOKENS, OFFSET_UNIT

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = tmp_path_factory.mktemp("cases") / "model"
    return load_model(write_random_model(folder, CONFIG, seed=9, deviation=0.25), dtype="float32")


def engine_of(loaded: LoadedModel, block_size: int) -> OfflineEngine:
    slab = sum(slab_bytes(group.shape, 256) for group in loaded.groups)
    return OfflineEngine(loaded, pool_bytes=24 * slab, values={"block_size": block_size})


def text(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(64) for _ in range(length)]


def dense_logprobs(loaded: LoadedModel, ids: Sequence[int]) -> Tensor:
    def attend(_layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key.repeat_interleave(2, 1).transpose(0, 1)[None],
            value.repeat_interleave(2, 1).transpose(0, 1)[None],
            is_causal=True,
        )
        return out[0].transpose(0, 1).contiguous()

    with torch.inference_mode():
        hidden = loaded.model.hidden(torch.tensor(ids), torch.arange(len(ids)), len(ids), attend)
        return torch.log_softmax(loaded.model.logits(hidden), -1)


def assert_scored(loaded: LoadedModel, result: OfflineResult) -> None:
    """One prompt log-probability per token after the first, equal to dense attention's."""
    ids = result.request.prompt_ids
    expected = dense_logprobs(loaded, ids)
    assert [entry.token_id for entry in result.prompt_logprobs] == ids[1:]
    own = [float(expected[i, token]) for i, token in enumerate(ids[1:])]
    assert [entry.logprob for entry in result.prompt_logprobs] == pytest.approx(own, abs=2e-4)
    (first,) = result.output_ids
    assert float(expected[-1].max() - expected[-1, first]) < 1e-4


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_every_length_matches_dense_for_every_block_size(loaded: LoadedModel, block_size: int) -> None:
    """Case C.11. Token by token, so that decode attention sees every length; then whole prompts around the edges."""
    engine = engine_of(loaded, block_size)
    engine.scheduler._planner.max_batched = 1
    whole = engine.add(text(3 * block_size + 1), SamplingParams(max_tokens=1, prompt_logprobs=0))
    engine.run()
    assert_scored(loaded, whole)
    engine = engine_of(loaded, block_size)
    edges = [1, 2, block_size - 1, block_size, block_size + 1, 2 * block_size, 3 * block_size + 1]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    results = [engine.add(text(length, seed=length), params) for length in edges]
    engine.run()
    for result in results:
        assert_scored(loaded, result)


@pytest.mark.parametrize("block_size", [16, 64])
def test_a_repeated_prompt_with_prompt_logprobs(loaded: LoadedModel, block_size: int) -> None:
    """Case B.9: both runs give one entry per token, equal; a fully cached prompt still recomputes its last token."""
    engine = engine_of(loaded, block_size)
    for length in (block_size - 1, block_size, block_size + 1, 2 * block_size, 2 * block_size + 1):
        scored = SamplingParams(max_tokens=1, prompt_logprobs=1)
        runs = []
        for params in (scored, SamplingParams(max_tokens=1), scored):
            runs.append(engine.add(text(length, seed=length), params))
            engine.run()
        first, plain, second = runs
        assert_scored(loaded, first)
        assert first.prompt_logprobs == second.prompt_logprobs
        assert first.output_ids == plain.output_ids == second.output_ids
        cached = plain.request.num_cached_tokens
        assert cached == (length - 1) // 16 * 16


@pytest.mark.parametrize("shared", [17, 40, 64, 70, 100])
@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_a_shared_block_shows_nothing_past_what_is_shared(loaded: LoadedModel, block_size: int, shared: int) -> None:
    """Case B.10: B shares the first tokens of A, cut anywhere; all memory but B's own tokens is NaN from then on."""
    long = text(140, seed=1)
    short = long[:shared] + text(25, seed=2)
    cold = engine_of(loaded, block_size)
    expected = cold.add(short, SamplingParams(max_tokens=12))
    cold.run()

    engine = engine_of(loaded, block_size)
    engine.add(long, SamplingParams(max_tokens=12))
    engine.run()
    execute = engine.runner.execute

    def poisoned(plan: StepPlan, tables: Any) -> list[SequenceOutput]:
        poison_all_but(engine, plan)
        return execute(plan, tables)

    engine.runner.execute = poisoned  # type: ignore[method-assign]
    result = engine.add(short, SamplingParams(max_tokens=12, logprobs=0))
    engine.run()
    assert result.request.num_cached_tokens >= shared // 16 * 16 - 16
    assert result.output_ids == expected.output_ids
    assert all(entry.logprob > -100 for entry in result.logprobs)  # finite


def poison_all_but(engine: OfflineEngine, plan: StepPlan) -> None:
    """Overwrite every byte of the arenas with NaN except the computed tokens of the plan's sequences."""
    for number, group in enumerate(engine.loaded.groups):
        arena, shape = engine.runner.arenas[number], group.shape
        stride = shape.tile_stride(NATIVE)
        kept = torch.full_like(arena.view(torch.float32), torch.nan).view(torch.uint8)
        for sequence in plan.sequences:
            for entry in engine.cache.entries(sequence.request, number):
                tokens = max(0, min(entry.valid, sequence.start - entry.first))
                for tile, start in enumerate(range(0, tokens, NATIVE_TILE_TOKENS)):
                    begin = entry.offset * OFFSET_UNIT + tile * stride
                    source, target = (
                        # a native tile: layers, heads, keys and values, tokens, channels
                        memory[begin : begin + stride].view(shape.num_layers, shape.num_kv_heads, 2, 16, -1)
                        for memory in (arena, kept)
                    )
                    valid = min(NATIVE_TILE_TOKENS, tokens - start)
                    target[..., :valid, :] = source[..., :valid, :]
        arena.copy_(kept)
