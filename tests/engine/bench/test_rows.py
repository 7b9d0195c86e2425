"""The engine that benchmarks run is the real one; loads are what they say."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from engine.bench.__main__ import parser, row_names
from engine.bench.engines import build, closed_loop, decode_steps
from engine.bench.shapes import KV_BOUND, TINY_KV, make_model, weight_bytes
from engine.bench_peers.gguf_writer import interleaved, target_name, tensors


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny", {**TINY_KV, "max_position_embeddings": 512})


def test_decode_steps_hold_the_batch_and_leave_nothing(folder: Path) -> None:
    engine = build(folder, time.process_time_ns, pool_bytes=4 << 20)
    assert decode_steps(engine, 3, 20, steps=4) > 0
    assert {"rest", "schedule", "tables", "results", "emit", "sampling"} < set(engine.parts.spent_us(4))
    assert not engine.core.has_work
    engine.cache.check_integrity()


def test_all_is_converted_before_steps_count(folder: Path) -> None:
    engine = build(folder, time.process_time_ns, pool_bytes=4 << 20, values={"kv_format": "int8", "block_size": 32})
    reset, waiting = engine.parts.reset, list[bool]()

    def begin() -> None:
        waiting.append(engine.cache.has_recode_work())
        reset()

    engine.parts.reset = begin  # type: ignore[method-assign]
    decode_steps(engine, 3, 200, steps=2, settle=0)
    assert waiting == [False]
    assert engine.scheduler.counters.recoded_tokens >= 3 * 128


def test_closed_loops_give_every_token(folder: Path) -> None:
    engine = build(folder, time.process_time_ns, pool_bytes=4 << 20, is_timed=False)
    figures = closed_loop(engine, 2, 5, 16, 6)
    assert engine.scheduler.counters.generation_tokens == 30
    assert engine.scheduler.counters.requests_completed == 5
    assert figures.tokens_per_s > 0
    assert 0 < figures.tpot_p50_s <= figures.tpot_p95_s


def test_the_kv_bound_shape_is_bound_by_kv() -> None:
    token = 2 * 2 * KV_BOUND["num_hidden_layers"] * KV_BOUND["num_key_value_heads"] * KV_BOUND["head_dim"]
    assert 16 * 1024 * token >= 2 * weight_bytes(KV_BOUND)


def test_every_row_can_be_chosen() -> None:
    assert {"breakdown", "http", "kv_bound", "resident", "start", "throughput"} == set(row_names())
    assert parser().parse_args(["--rows", "http,start", "--concurrency", "1,8"]).concurrency == (1, 8)
    for wrong in (["--rows", "nothing"], ["--concurrency", "0"], ["--formats", "int2"]):
        with pytest.raises(SystemExit):
            parser().parse_args(wrong)


def test_gguf_tensors_are_named_and_ordered_as_llama_cpp_has_them(folder: Path) -> None:
    found = tensors(folder / "model.safetensors")
    assert target_name("model.layers.1.self_attn.q_proj.weight") == "blk.1.attn_q.weight"
    assert {target_name(name) for name in found} >= {"token_embd.weight", "output.weight", "output_norm.weight"}
    query = found["model.layers.0.self_attn.q_proj.weight"]  # 2 heads of 16
    turned = interleaved(query, 2)
    assert (turned[0] == query[0]).all()
    assert (turned[1] == query[8]).all()
    assert (turned[2] == query[1]).all()
    assert (turned[16] == query[16]).all()
