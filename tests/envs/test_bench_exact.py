"""The benchmark's exact rows, small: capacity, hits under recorded times, random actions in pieces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.formats import BlockClass, KVShape
from engine.loader import load_model
from engine.memory_model import GroupSpec
from engine.models.random_model import write_random_model
from engine.tunable_state import Patch
from envs.bench_exact import handed_out
from envs.live_run import LiveEngineRun
from envs.profile import capacities
from envs.shake import ShakeError, Shaken, pieces, shake
from envs.simulator import SimOptions
from envs.workload.trace import TraceRequest, from_requests

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 10000.0,
}  # fmt: skip


def test_capacity_is_what_the_pool_hands_out_in_every_class() -> None:
    groups = [GroupSpec("a", (0, 1), KVShape(2, 2, 64, 2)), GroupSpec("b", (2,), KVShape(1, 1, 128, 2))]
    rows = capacities(groups, 24 << 20)
    assert len({(row.kv_format, row.block_size) for row in rows}) == len(rows) > 12
    for row in rows:
        assert handed_out(groups, 24 << 20, BlockClass(row.kv_format, row.block_size)) == row.blocks


def test_hits_and_all_other_counts_are_equal_under_recorded_times(tmp_path: Path) -> None:
    """Sessions with growing prefixes in a pool too small for all, a change of format on the way."""
    live = LiveEngineRun(load_model(write_random_model(tmp_path / "m", CONFIG, seed=1)), 1 << 19, cpu_time=True)
    requests = [
        TraceRequest(
            0.004 * turn + 0.0005 * client, 60 * turn + 40, 12, tuple(100 * client + i for i in range(4 * turn))
        )
        for turn in range(1, 6)
        for client in range(6)
    ]
    trace = from_requests("sessions", sorted(requests, key=lambda r: r.arrival_s), block_tokens=16)
    options = SimOptions(1 << 19, 480, max_waiting=64, recode_share=0.15)
    changes = [(0.01, Patch({"kv_format": "int8"}, "test"))]
    outcome, record = live.record(trace, options, changes)
    counters, differing = live.play_back(trace, options, record, changes)
    assert outcome.counters.prefix_cache_hits > 0
    assert outcome.counters.requests_completed == len(trace.requests)
    assert differing == []
    assert counters == outcome.counters
    with pytest.raises(ValueError, match="host"):
        live.run(trace, SimOptions(1 << 19, 480, host_pool_bytes=1 << 19))


def test_pieces_make_up_the_number_of_steps() -> None:
    assert list(pieces(2500, 7)) == [(7, 1000), (8, 1000), (9, 500)]
    total = Shaken()
    for seed, steps in ((0, 30), (1, 30)):
        total.add(shake(seed, steps))
    assert (total.steps, total.episodes) == (60, 2)
    assert total.changes > 30
    assert total.audits == 2


def test_what_breaks_is_said_with_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("two blocks in one place")

    monkeypatch.setattr("engine.cache_manager.CacheManager.check_integrity", broken)
    with pytest.raises(ShakeError, match="seed 3, chat-turns, step 5: ValueError: two blocks"):
        shake(3, 5)
