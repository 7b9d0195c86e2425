"""The comparison of growing caches: bytes are the ones moved, and an allocator that dawdles or copies is found out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.cache_bench.growth import Case, Concatenating, Growth, Paged, reduction_pct
from engine.cache_bench.rows.alloc_overhead import compare
from engine.cache_manager import CacheManager
from engine.clock import ManualClock, RealClock
from engine.loader import LoadedModel, load_model
from engine.models.random_model import write_random_model

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2048,
}
TOKEN_BYTES = 2 * 2 * 16 * 2  # layers, keys and values, head_dim, bfloat16
CASE = Case(batch=3, prompt=100, steps=5)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = tmp_path_factory.mktemp("growth") / "model"
    return load_model(write_random_model(folder, CONFIG, seed=1), dtype="bfloat16")


def test_concatenating_copies_all_that_is_there(loaded: LoadedModel) -> None:
    cache = Concatenating(loaded, CASE, ManualClock())
    assert cache.grow().moved_bytes == 2 * TOKEN_BYTES * 102  # median of 100 to 104 tokens, read and written
    assert all(tensor.shape[2] == 105 for tensor in cache._old)


def test_paged_moves_table_rows_only_and_grows_by_every_step(loaded: LoadedModel) -> None:
    paged = Paged(loaded, CASE, ManualClock())
    growth = paged.grow()
    assert growth.moved_bytes == 2 * 4 * (7 * 4 + 2)  # seven blocks of 16, one slot, int32
    assert [request.num_computed_tokens for request in paged._requests] == [105] * 3
    paged._cache.check_integrity()


def test_an_allocator_that_dawdles_is_found_out(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    original = CacheManager.allocate

    def slow(self: CacheManager, *args: Any, **options: Any) -> bool:
        clock.advance_s(0.004)
        return original(self, *args, **options)

    paged = Paged(loaded, CASE, clock)
    assert paged.grow() == Growth(0.0, 240)
    paged = Paged(loaded, CASE, clock)
    monkeypatch.setattr(CacheManager, "allocate", slow)
    assert paged.grow().token_ns == 4_000_000


def test_a_kernel_that_dawdles_is_found_out(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    paged = Paged(loaded, CASE, clock)
    monkeypatch.setattr("engine.cache_bench.growth.ops.write_kv", lambda *_: clock.advance_s(0.003))
    assert paged.grow().token_ns == 2 * 1_000_000  # two layers, three sequences


def test_figures_of_one_case_fit_together(loaded: LoadedModel) -> None:
    figures = compare(loaded, CASE, RealClock())
    assert figures["bytes_reduction_pct"] == pytest.approx(100 * (1 - 240 / (2 * TOKEN_BYTES * 102)), abs=1e-3)
    assert figures["paged_us"] > 0


def test_reduction_is_100_for_nothing_and_negative_for_more() -> None:
    assert reduction_pct(0, 50) == 100
    assert reduction_pct(-1, 50) == 100
    assert reduction_pct(5, 50) == 90
    assert reduction_pct(75, 50) == -50
