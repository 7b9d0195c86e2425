"""The harness without a server: results in order, end tokens, budgets, reproducibility, and errors for people."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.admission import AdmissionError
from engine.errors import EngineError
from engine.loader import LoadedModel, load_model
from engine.memory_model import slab_bytes
from engine.models.random_model import write_random_model
from engine.offline import OfflineEngine, generate
from engine.request import FinishReason, Request, RequestStatus, SamplingParams

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
POOL_BYTES = 4 << 20


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = tmp_path_factory.mktemp("offline") / "model"
    return load_model(write_random_model(folder, CONFIG, seed=4, deviation=0.2), dtype="float32")


def texts(*lengths: int) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(64) for _ in range(length)] for length in lengths]


def test_results_come_in_the_order_of_the_prompts(loaded: LoadedModel) -> None:
    prompts = texts(60, 4, 17)
    params = [SamplingParams(max_tokens=count) for count in (3, 9, 5)]
    together = generate(loaded, prompts, params, pool_bytes=POOL_BYTES)
    assert [result.request.prompt_ids for result in together] == prompts
    assert [len(result.output_ids) for result in together] == [3, 9, 5]
    assert {result.finish_reason for result in together} == {FinishReason.LENGTH}
    alone = [generate(loaded, [p], one, pool_bytes=POOL_BYTES)[0] for p, one in zip(prompts, params, strict=True)]
    assert [result.output_ids for result in alone] == [result.output_ids for result in together]


def test_end_tokens_stop_unless_ignored(loaded: LoadedModel) -> None:
    (prompt,) = texts(20)
    params = SamplingParams(max_tokens=8)
    (free,) = generate(loaded, [prompt], params, pool_bytes=POOL_BYTES)
    ending = replace(loaded, eos_token_ids=frozenset({free.output_ids[2]}))
    stop = free.output_ids.index(free.output_ids[2]) + 1
    (stopped,) = generate(ending, [prompt], params, pool_bytes=POOL_BYTES)
    assert stopped.output_ids == free.output_ids[:stop]
    assert stopped.finish_reason is FinishReason.STOP
    (ignored,) = generate(ending, [prompt], replace(params, ignore_eos=True), pool_bytes=POOL_BYTES)
    assert ignored.output_ids == free.output_ids


def test_sampling_is_reproducible_whatever_the_batch(loaded: LoadedModel) -> None:
    prompts = texts(30, 11, 50)
    params = [SamplingParams(max_tokens=8, temperature=1.0, top_p=0.9, seed=seed) for seed in range(3)]
    together = generate(loaded, prompts, params, pool_bytes=POOL_BYTES)
    for prompt, one, result in zip(prompts, params, together, strict=True):
        (alone,) = generate(loaded, [prompt], one, pool_bytes=POOL_BYTES, values={"max_num_batched_tokens": 64})
        assert alone.output_ids == result.output_ids
    unseeded = SamplingParams(max_tokens=8, temperature=1.0)
    runs = [generate(loaded, prompts[:1], unseeded, pool_bytes=POOL_BYTES, seed=seed) for seed in (1, 1, 2)]
    first, again, other = (run[0].output_ids for run in runs)
    assert first == again != other


def test_prompt_logprobs_survive_preemption_once_each(loaded: LoadedModel) -> None:
    prompts = texts(100, 90)
    params = SamplingParams(max_tokens=4, logprobs=1, prompt_logprobs=0)
    calm = generate(loaded, prompts, params, pool_bytes=POOL_BYTES)
    engine = OfflineEngine(loaded, pool_bytes=POOL_BYTES, values={"max_num_batched_tokens": 64})
    allocate, calls = engine.cache.allocate, 0

    def scarce(request: Request, num_new_tokens: int, **options: bool) -> bool:
        nonlocal calls
        calls += request.status is RequestStatus.RUNNING and len(engine.scheduler.running) > 1
        if calls == 1:  # the older one decodes, and takes the room of the one in the middle of its prompt
            calls = 100
            return False
        return allocate(request, num_new_tokens, **options)

    engine.cache.allocate = scarce  # type: ignore[method-assign]
    engine.cache.take_slot = lambda _: False  # type: ignore[method-assign]  # so that everything asks above
    results = [engine.add(prompt, params) for prompt in prompts]
    engine.run()
    assert sum(result.request.num_preemptions for result in results) == 1
    for result, expected in zip(results, calm, strict=True):
        assert [entry.token_id for entry in result.prompt_logprobs] == result.request.prompt_ids[1:]
        assert [entry.token_id for entry in result.logprobs] == result.output_ids == expected.output_ids
        pairs = zip(result.prompt_logprobs, expected.prompt_logprobs, strict=True)
        assert all(a.logprob == pytest.approx(b.logprob, abs=1e-4) for a, b in pairs)


def test_changes_between_steps(loaded: LoadedModel) -> None:
    engine = OfflineEngine(loaded, pool_bytes=POOL_BYTES)
    result = engine.add(texts(80)[0], SamplingParams(max_tokens=30))
    engine.step()
    engine.apply(kv_format="int8", block_size=32)
    engine.run()
    assert len(result.output_ids) == 30
    assert engine.values["kv_format"] == "int8"
    with pytest.raises(ValueError, match="kv_format"):
        engine.apply(kv_format="fp8")


@pytest.mark.parametrize("kv_format", ["int8", "int4"])
def test_one_that_has_to_start_over_does(loaded: LoadedModel, kv_format: str) -> None:
    """It fills the pool, and a change of its blocks half-way leaves no room: nothing runs in the step that gives up."""
    slab = sum(slab_bytes(group.shape, 256) for group in loaded.groups)
    values = {"max_num_batched_tokens": 64, "block_size": 16}
    engine = OfflineEngine(loaded, pool_bytes=3 * slab, values=values, recent_tokens=32, max_model_len=1024)
    result = engine.add(texts(engine.cache.max_sequence_tokens() - 5)[0], SamplingParams(max_tokens=6, ignore_eos=True))
    for _ in range(2):
        engine.step()
    engine.apply(kv_format=kv_format, block_size=256)
    engine.run()
    assert result.request.num_preemptions == 1
    assert len(result.output_ids) == 6


def test_what_cannot_run_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(EngineError, match="too small"):
        OfflineEngine(loaded, pool_bytes=100)
    engine = OfflineEngine(loaded, pool_bytes=POOL_BYTES)
    with pytest.raises(AdmissionError, match="256"):
        engine.add(texts(300)[0], SamplingParams(max_tokens=1))
    engine.run()
