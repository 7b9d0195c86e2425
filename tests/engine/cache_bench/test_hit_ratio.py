"""The benchmark's row of prefix hits, on a small made-up trace."""

from __future__ import annotations

import csv
import gzip
import random
from pathlib import Path
from typing import Any

import pytest

from engine.cache_bench.context import Context, Skipped
from engine.cache_bench.rows import hit_ratio


def trace(seed: int, requests: int) -> list[tuple[float, tuple[int, ...]]]:
    """Sessions whose prompts grow, with blocks that only they have."""
    rng = random.Random(seed)
    sessions: list[tuple[int, ...]] = []
    rows, fresh = [], 0
    for number in range(requests):
        index = rng.randrange(len(sessions) + 3)
        chain = sessions[index] if index < len(sessions) else ()
        added = rng.randrange(1, 8)
        chain = (*chain, *range(fresh, fresh + added))
        fresh += added
        if index < len(sessions):
            sessions[index] = chain[:20]
        else:
            sessions = [*sessions, chain][-40:]
        rows.append((number // 3 * 3.0, chain))
    return rows


def test_the_count_is_least_recently_used_with_ends_older_than_starts() -> None:
    chains = [(1, 2, 3), (4,), (1, 2, 3), (5, 6), (1, 2, 3)]
    assert hit_ratio.count_lru(chains, 4) == [0, 0, 3, 0, 2]
    assert hit_ratio.count_lru(chains, 3) == [0, 0, 2, 0, 1]


@pytest.mark.parametrize("seed", range(3))
def test_the_cache_manager_agrees_with_the_count(seed: int) -> None:
    rows = trace(seed, 300)
    hits = hit_ratio.replay(rows, "lru", num_blocks=16 * 33)
    assert hits == hit_ratio.count_lru([chain for _, chain in rows], 16 * 33)
    assert sum(hits) > 100
    assert hits != hit_ratio.replay(rows, "lfu", num_blocks=16 * 33)


def test_the_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hit_ratio, "NUM_BLOCKS", 16 * 33)
    monkeypatch.setattr(hit_ratio.replay, "__defaults__", (16 * 33,))
    with pytest.raises(Skipped, match="TRACES"):
        hit_ratio.run(Context(tmp_path))
    with pytest.raises(Skipped, match="mooncake"):
        hit_ratio.run(Context(tmp_path, traces=tmp_path))
    with gzip.open(tmp_path / hit_ratio.TRACE, "wt", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["arrival_s", "prompt_tokens", "output_tokens", "hash_ids_b512"])
        writer.writerows([at, 512 * len(chain), 1, " ".join(map(str, chain))] for at, chain in trace(1, 200))
    figures: Any = hit_ratio.run(Context(tmp_path, traces=tmp_path, log=lambda _line: None))
    assert set(figures) == set(hit_ratio.KEYS)
    assert figures["best_policy"] in {"lfu", "cost"}
    assert figures["best_policy_hit_ratio"] == figures["hit_ratio_by_policy"][figures["best_policy"]]["whole"]
    assert 0 < figures["lru_hit_ratio"] < 1
    monkeypatch.setattr(hit_ratio, "count_lru", lambda chains, _num: [0] * len(chains))
    with pytest.raises(AssertionError, match="request"):
        hit_ratio.run(Context(tmp_path, traces=tmp_path, log=lambda _line: None))
