"""The profiler runs real steps and reports what was in them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from engine.attention import BatchBuilder
from engine.formats import FORMATS
from engine.loader import LoadedModel, load_model
from engine.models.random_model import write_random_model
from engine.plan import StepPlan
from engine.profiling.measure import Measurer
from engine.profiling.scenarios import Scenario, scenarios
from engine.scheduler import Scheduler
from engine.step_counts import RECODE_NAMES, STEP_INDEX, STEP_NAMES, StepCounter

CONFIG = {
    "architectures": ["MistralForCausalLM"], "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 10000.0,
}  # fmt: skip


@pytest.fixture(scope="module", params=[None, 144])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("model")
    return load_model(write_random_model(folder, {**CONFIG, "sliding_window": request.param}, seed=1))


def test_a_scenario_yields_prefill_decode_and_recode_samples(loaded: LoadedModel) -> None:
    measurer = Measurer(loaded, 4 << 20)
    samples = measurer.run([Scenario(3, 200, 128, "int8", 32, then=("kv_format", "int4"))])
    assert len(samples.step_counts) == len(samples.step_s)
    assert len(samples.recode_counts) == len(samples.recode_s)
    assert all(seconds > 0 for seconds in (*samples.step_s, *samples.recode_s))
    steps = [dict(zip(STEP_NAMES, row, strict=True)) for row in samples.step_counts]
    assert sum(step["prefill_token"] for step in steps) >= 590  # decoding sequences take their tokens first
    assert any(step["decode_sequence"] == 3 and not step["prefill_token"] and step["decode_kv_int8"] for step in steps)
    recodes = [dict(zip(RECODE_NAMES, row, strict=True)) for row in samples.recode_counts]
    assert any(row["recode_native_int8"] for row in recodes)
    assert any(row["recode_int8_int4"] for row in recodes)


def test_counts_agree_with_what_the_runner_reads(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """KV bytes by the counter against those that the batch builder finds in the tables that kernels get."""
    compared = 0

    def both(self: BatchBuilder, scheduled: object, tables: object) -> object:
        nonlocal compared
        inputs = build(self, scheduled, tables)
        counter = counters.setdefault(id(self), StepCounter(loaded.groups))
        counts = counter.step(scheduled, tables)
        assert counter.kv_bytes_read == inputs.kv_bytes_read
        assert counter.kv_bytes_written == inputs.kv_bytes_written
        assert counts[STEP_INDEX["decode_sequence"]] == inputs.num_decode
        compared += 1
        return inputs

    counters: dict[int, StepCounter] = {}
    build = BatchBuilder.build
    monkeypatch.setattr(BatchBuilder, "build", both)
    measurer = Measurer(loaded, 4 << 20)
    for kv_format, block_size in (("native", 16), ("int4", 64), ("k8v4", 32)):
        measurer.run([Scenario(4, 200, 64, kv_format, block_size, then=("block_size", 128))])
    assert compared > 100


def test_an_empty_plan_counts_nothing_but_itself(loaded: LoadedModel) -> None:
    counts = StepCounter(loaded.groups).step(StepPlan().sequences, None)  # type: ignore[arg-type]
    assert counts == [1] + [0] * (len(STEP_NAMES) - 1)


def test_scenarios_fit_and_come_cheapest_first() -> None:
    chosen = scenarios(pool_tokens=10_000, max_model_len=1024, max_tokens=5000)
    assert chosen
    assert all(s.tokens <= 5000 and s.context < 1024 for s in chosen)
    assert all(a.tokens <= b.tokens for a, b in pairwise(chosen))
    assert len(set(chosen)) == len(chosen)
    quick = scenarios(pool_tokens=10_000, max_model_len=1024, max_tokens=5000, quick=True)
    assert len(quick) < len(chosen)
    assert not scenarios(pool_tokens=10, max_model_len=1024, max_tokens=5000)


def test_a_pool_that_is_too_small_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(ValueError, match="too small"):
        Measurer(loaded, 100)
    assert isinstance(loaded.folder, Path)


def test_loads_run_over_a_pool_that_earlier_requests_left_full(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached: list[float] = []
    schedule = Scheduler.schedule

    def at_first(scheduler: Scheduler) -> StepPlan | None:
        usage = scheduler.cache.usage()
        cached.append(usage.cached_bytes / usage.pool_bytes)
        return schedule(scheduler)

    monkeypatch.setattr(Scheduler, "schedule", at_first)
    Measurer(loaded, 4 << 20).run([Scenario(4, 100)])
    assert cached[0] > 0.8


def test_a_step_knows_what_came_before_it(loaded: LoadedModel) -> None:
    """Cold caches beside and after a chunk, new tables when others decode, and neither when all goes on as it did."""
    served = Scenario(12, 40, every=3, output=12)
    steps = Measurer(loaded, 4 << 20).play([served])[served]
    rows = [dict(zip(STEP_NAMES, step.counts, strict=True)) for step in steps]
    decoded = sum(STEP_NAMES[index].startswith("decode_kv_") for index in range(len(STEP_NAMES))) - 1
    assert decoded == len(FORMATS)
    seen = set()
    for before, row in pairwise(rows):
        kv = sum(row[f"decode_kv_{kind.name}"] for kind in FORMATS)
        if row["chunk_step"]:
            assert (row["regrouped"], row["after_chunk"], row["decode_kv_cold"]) == (0, 0, kv)
            seen.add("cold" if kv else "alone")
            continue
        assert row["decode_kv_cold"] == 0
        assert row["after_chunk"] == before["prefill_token"]  # prompts are shorter than what counts at most
        if before["chunk_step"] or row["decode_sequence"] != before["decode_sequence"]:
            assert row["regrouped"] == 1
        seen.add("after" if row["after_chunk"] else "changed" if row["regrouped"] else "same")
    assert seen >= {"cold", "changed", "after", "same"}
