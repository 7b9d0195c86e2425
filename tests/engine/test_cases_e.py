"""Cases E.15, E.17, E.19 through the whole engine: a model's own window, positions after evictions, tiny contexts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.loader import LoadedModel, load_model
from engine.models.random_model import write_random_model
from engine.offline import OfflineEngine
from engine.request import SamplingParams

WINDOW = 8
WIDE_WINDOW = 200  # more than eviction keeps
CONFIG: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "sliding_window": WINDOW,
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = tmp_path_factory.mktemp("cases") / "model"
    return load_model(write_random_model(folder, CONFIG, seed=9, deviation=0.25), dtype="float32")


@pytest.fixture(scope="module", params=[None, WIDE_WINDOW])
def evicting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A model whose own window is none, or wider than what eviction keeps."""
    folder: Path = tmp_path_factory.mktemp("evicting") / "model"
    config = {**CONFIG, "sliding_window": request.param, "max_position_embeddings": 1024}
    return load_model(write_random_model(folder, config, seed=4, deviation=0.25), dtype="float32")


def band(length: int, window: int | None) -> Tensor:
    """Position t attends t - window + 1 .. t, the meaning of W that counts the current token."""
    distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    return (distance >= 0) & (distance < (window or length))


def dense_logprobs(loaded: LoadedModel, ids: list[int], seen: Tensor) -> Tensor:
    """With a mask [tokens, tokens] of what each position attends, every key at the position of its token."""

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # noqa: ARG001 - all are alike
        out = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key.repeat_interleave(2, 1).transpose(0, 1)[None],
            value.repeat_interleave(2, 1).transpose(0, 1)[None],
            attn_mask=seen,
        )
        return out[0].transpose(0, 1).contiguous()

    with torch.inference_mode():
        hidden = loaded.model.hidden(torch.tensor(ids), torch.arange(len(ids)), len(ids), attend)
        return torch.log_softmax(loaded.model.logits(hidden), -1)


@pytest.mark.parametrize("eviction", ["none", "window", "heavy_hitter"])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("length", [1, WINDOW - 2, WINDOW - 1, WINDOW, WINDOW + 1, 15, 16, 17, 40])
def test_logits_while_the_length_reaches_the_window(
    loaded: LoadedModel, length: int, block_size: int, eviction: str
) -> None:
    """huggingface/transformers#37574: W = 8, prompts of 6, 7, 8, 9 and others, then one token after the other."""
    engine = OfflineEngine(loaded, pool_bytes=8 << 20, values={"block_size": block_size, "eviction": eviction})
    result = engine.add([(7 * i + length) % 64 for i in range(length)], SamplingParams(max_tokens=20, logprobs=0))

    def look(_plan: object) -> None:
        if engine.cache.holds(result.request):  # every position that the next token attends is stored
            entries = engine.cache.entries(result.request, 0)
            stored = {entry.first + i for entry in entries for i in range(entry.valid)}
            computed = result.request.num_computed_tokens
            assert set(range(max(0, computed - WINDOW + 1), computed)) <= stored

    engine.run(look)
    ids = result.request.all_ids
    expected = dense_logprobs(loaded, ids, band(len(ids), WINDOW))
    found = [entry.logprob for entry in result.logprobs]
    assert found == pytest.approx(
        [float(expected[length - 1 + i, token]) for i, token in enumerate(result.output_ids)], abs=2e-4
    )
    assert len(found) == 20


@pytest.mark.parametrize("eviction", ["window", "heavy_hitter"])
@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize("dropped_blocks", [0, 1, 5])
def test_positions_count_tokens_seen_after_any_eviction(
    evicting: LoadedModel, eviction: str, block_size: int, dropped_blocks: int
) -> None:
    """rajveer43/VeloxQuant-MLX#389: a key keeps its rotation, and the next query is where the tokens seen end.

    The prompt is as long as what stays, plus so many blocks; further chunks go while the answer is generated.
    """
    length = 16 + 128 + min(dropped_blocks * block_size, 400)
    values = {"eviction": eviction, "keep_tokens": 128, "block_size": block_size}
    engine = OfflineEngine(evicting, pool_bytes=8 << 20, values=values)
    result = engine.add([(7 * i * i + i) % 64 for i in range(length)], SamplingParams(max_tokens=60, logprobs=0))
    window = evicting.config.windows[0]
    seen = band(length + 60, window)

    def look(_plan: object) -> None:
        computed = result.request.num_computed_tokens
        if engine.cache.holds(result.request) and computed >= length:
            entries = engine.cache.entries(result.request, 0)
            assert computed == result.request.num_tokens - 1  # where the next query is
            kept = torch.zeros(length + 60, dtype=torch.bool)
            for entry in entries:
                kept[entry.first : entry.first + entry.valid] = True
            kept[computed] = True
            seen[computed] &= kept

    engine.run(look)
    request = result.request
    assert request.num_evicted_tokens >= (length + 59 - 16 - 128) // 16 * 16 or window
    ids = request.all_ids
    expected = dense_logprobs(evicting, ids, seen)
    found = [entry.logprob for entry in result.logprobs]
    assert found == pytest.approx(
        [float(expected[length - 1 + i, token]) for i, token in enumerate(result.output_ids)], abs=2e-4
    )
    lost = band(length + 60, window) & ~seen
    assert lost.any() == (request.num_evicted_tokens > 0)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_tiny_contexts_lose_nothing(evicting: LoadedModel, length: int) -> None:
    """NVIDIA/kvpress#264: a budget that rounds to nothing must not empty the cache."""
    engine = OfflineEngine(evicting, pool_bytes=8 << 20, values={"eviction": "heavy_hitter", "keep_tokens": 128})
    result = engine.add([5] * length, SamplingParams(max_tokens=200, logprobs=0, ignore_eos=True))
    while result.request.num_tokens < 140:
        engine.step()
        assert result.request.num_evicted_tokens == 0
        assert sum(entry.valid for entry in engine.cache.entries(result.request, 0)) >= result.request.num_tokens - 1
    engine.run()
    assert all(math.isfinite(entry.logprob) for entry in result.logprobs)
    assert result.request.num_evicted_tokens > 0
