"""Cases of section E through the whole engine: a model's own window, positions after evictions, tiny contexts,
compaction in the middle of answers.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.compaction import Compactor
from engine.loader import LoadedModel, load_model
from engine.memory_model import slab_bytes
from engine.models.random_model import write_random_model
from engine.offline import OfflineEngine
from engine.plan import StepPlan
from engine.request import CachePolicy, SamplingParams
from kernels import ops
from kernels.layout import OFFSET_UNIT

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


CHUNK, KEEP, SINKS = 16, 128, 16


@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize("over", ["0", "1", "bs", "5 bs"])
def test_a_kept_key_keeps_its_bytes_and_the_next_query_its_position(
    evicting: LoadedModel, over: str, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """rajveer43/VeloxQuant-MLX#389 for heavy hitters: a prompt of 0, 1, bs, 5 bs tokens over the budget.

    Whole chunks go, so one token over drops a chunk only with the token that fills it.
    """
    more = {"0": 0, "1": 1, "bs": block_size, "5 bs": 5 * block_size}[over]
    length = SINKS + KEEP + more
    values = {"eviction": "heavy_hitter", "keep_tokens": KEEP, "block_size": block_size}
    engine = OfflineEngine(evicting, pool_bytes=16 << 20, values=values, max_model_len=2048)
    result = engine.add([(11 * i * i + 3 * i) % 64 for i in range(length)], SamplingParams(max_tokens=40))
    request, keys, positions = result.request, dict[int, Tensor](), list[int]()
    hidden = evicting.model.hidden

    def spy(token_ids: Tensor, at: Tensor, *others: Any, **options: Any) -> Tensor:
        positions.extend(at.tolist())
        return hidden(token_ids, at, *others, **options)

    monkeypatch.setattr(evicting.model, "hidden", spy)

    def look(_plan: object) -> None:
        if not engine.cache.holds(request):
            return
        entries = engine.cache.entries(request, 0)
        rows = torch.tensor([[e.offset, e.format_code, e.first, e.valid] for e in entries], dtype=torch.int32)
        stored = [p for e in entries for p in range(e.first, e.first + e.valid)]
        shape = evicting.groups[0].shape
        for layer in range(shape.num_layers):
            key, _ = ops.gather_kv(engine.runner.arenas[0], shape, layer, rows, len(rows), native_dtype=torch.float32)
            for position, row in zip(stored, key, strict=True):
                number = shape.num_layers * position + layer
                assert torch.equal(keys.setdefault(number, row.clone()), row), position

    engine.run(look)
    assert positions == list(range(length + 39))
    if evicting.config.windows[0] is None:
        assert request.num_evicted_tokens == (more + 39) // CHUNK * CHUNK


class Scattered:
    """Requests of which every other one ends early, and what the pool's free memory is overwritten with."""

    def __init__(self, loaded: LoadedModel, num_slabs: int) -> None:
        slab = sum(slab_bytes(group.shape, 256) for group in loaded.groups)
        self.engine = OfflineEngine(
            loaded, pool_bytes=num_slabs * slab, values={"block_size": 16, "max_num_batched_tokens": 512}
        )
        self.results = [
            self.engine.add(
                [(7 * i * i + i + seed) % 64 for i in range(40)],
                SamplingParams(max_tokens=90 if seed % 2 else 12),
                policy=CachePolicy(use_prefix_cache=False),
            )
            for seed in range(20)
        ]
        self.steps = 0

    def look(self) -> None:
        """After every step."""
        engine = self.engine
        engine.cache.check_integrity()
        ((pool, arena),) = zip(engine.cache._pools, engine.runner.arenas, strict=True)
        owners: dict[int, str] = {}
        kept = torch.full_like(arena, 255)  # NaN
        for request in engine.scheduler.running:
            for block in engine.cache._by_request[request.request_id].tables[0].blocks:
                assert owners.setdefault(block.offset, request.request_id) == request.request_id
                start, size = block.offset * OFFSET_UNIT, pool.arena.block_bytes(block.block_class)
                assert kept[start : start + size].eq(255).all(), "blocks overlap"
                kept[start : start + size] = arena[start : start + size]
        arena.copy_(kept)
        self.steps += 1


def test_compaction_and_new_block_sizes_in_the_middle_of_answers_change_no_token(
    evicting: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ggml-org/llama.cpp#12253: every other request ends, blocks move together, sizes change, free memory is NaN."""

    def run(num_slabs: int, sizes: dict[int, int]) -> tuple[list[list[int]], int]:
        world = Scattered(evicting, num_slabs)

        def after(_plan: StepPlan) -> None:
            world.look()
            if world.steps in sizes:
                world.engine.apply(block_size=sizes[world.steps])

        world.engine.run(after)
        assert world.engine.cache.counters.preemptions == 0
        return [result.output_ids for result in world.results], compacted.pop() if compacted else 0

    compacted: list[int] = []
    compact = Compactor.plan

    def spy(compactor: Compactor, *arguments: Any, **options: Any) -> Any:
        units = compact(compactor, *arguments, **options)
        compacted.append(len(units) + (compacted.pop() if compacted else 0))
        return units

    monkeypatch.setattr(Compactor, "plan", spy)
    plain, none = run(40, {})
    assert none == 0
    tight, moved = run(8, {20: 256, 40: 64, 60: 128, 70: 16})
    assert moved > 10
    assert tight == plain
