"""Sessions for the host tier's rows: reproducible, on a clock that only counts what the engine did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.cache_bench.rows.offload_ceiling import prefill_seconds
from engine.cache_bench.rows.offload_gain import crossover
from engine.cache_bench.sessions import LapClock, SessionLoad, SessionShape, quantile, run_together
from engine.loader import LoadedModel, load_model
from engine.models.random_model import write_random_model
from engine.transfers import HostLink

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
SHAPE = SessionShape(num_sessions=6, turns=3, first_tokens=200, turn_tokens=20, output_tokens=8, think_s=0.5)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = tmp_path_factory.mktemp("sessions") / "model"
    return load_model(write_random_model(folder, CONFIG, seed=5), dtype="float32")


def test_the_clock_stands_still_between_laps() -> None:
    clock = LapClock()
    with clock.lap():
        sum(range(200_000))
    worked = clock.now_ns()
    sum(range(200_000))
    assert clock.now_ns() == worked > 0
    clock.skip_s(2.5)
    assert clock.now_ns() == worked + 2_500_000_000


def test_all_sessions_end_and_a_host_tier_finds_what_the_device_has_lost(loaded: LoadedModel) -> None:
    roomy = SessionLoad(loaded, SHAPE, 8192, seed=1)
    tight = SessionLoad(loaded, SHAPE, 1024, seed=1, host_tokens=8192, link=HostLink(1e8, 1e8))
    bare = SessionLoad(loaded, SHAPE, 1024, seed=1)
    run_together([roomy, tight, bare])
    for load in (roomy, tight, bare):
        assert len(load.tally.ttft_s) == 18
        assert len(load.tally.tbt_s) == 18 * 7
        assert load.tally.output_tokens == 18 * 8
    hits = [load.engine.cache.counters.prefix_cache_hits for load in (roomy, tight, bare)]
    assert hits[0] >= hits[1] > hits[2]
    assert tight.engine.cache.counters.host_hit_tokens > 0
    # Thinking costs no time on this clock but in the arrivals.
    assert roomy.clock.now_ns() / 1e9 > roomy.tally.busy_s


def test_the_same_seed_gives_the_same_prompts(loaded: LoadedModel) -> None:
    loads = [SessionLoad(loaded, SHAPE, 8192, seed=seed) for seed in (3, 3, 4)]
    run_together(loads)
    tokens = [load.tally.prompt_tokens for load in loads]
    assert tokens[0] == tokens[1] != tokens[2]


def test_quantiles() -> None:
    assert [quantile([3.0, 1.0, 2.0, 4.0], q) for q in (0.5, 0.95, 1.0)] == [3.0, 4.0, 4.0]


def test_prefill_cost_is_found_beside_a_constant_and_decodes(loaded: LoadedModel) -> None:
    load = SessionLoad(loaded, SHAPE, 8192, seed=0)
    load.tally.steps = [(d, p, 0.002 + 0.001 * d + 0.0001 * p) for d in range(4) for p in (0, 50, 300)]
    assert prefill_seconds(load) == pytest.approx(1e-4)


def test_crossover() -> None:
    assert crossover({1: 1.1, 8: 1.2}) == 1.0
    assert crossover({1: 0.9, 8: 1.0}) is None
    assert crossover({1: 1.0, 8: 1.04}) == pytest.approx(8**0.5, abs=0.1)
