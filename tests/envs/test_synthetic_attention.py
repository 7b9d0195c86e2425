"""Drawn attention: its shape is the measured one, it is the same wherever it is drawn, and eviction goes by it."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from engine.formats import KVShape
from engine.memory_model import GroupSpec
from envs.arrivals_feed import TraceFeed
from envs.latency_model import LatencyModel
from envs.sim_request import SimRequest, make_request
from envs.simulator import SimOptions, Simulator
from envs.synthetic_attention import LATEST, LOG_SPREAD, MIDDLE, SyntheticAttention
from envs.workload.trace import TraceRequest, from_requests

MODEL = LatencyModel({"step": 1e-3, "prefill_token": 1e-5, "decode_sequence": 1e-4, "decode_kv_native": 1e-8})
KEEP = 128


def request(prompt: int = 40_000, output: int = 100, index: int = 0) -> SimRequest:
    return make_request(
        TraceRequest(0.0, prompt, output), index, 0, 16, max_model_len=prompt + output, prefix_cache=False
    )


def test_middle_chunks_scatter_as_measured_and_the_latest_count_for_more() -> None:
    mass = SyntheticAttention(1).of(request(), 40_000, 16).groups[0]
    assert len(mass) == 2500
    middle = np.log(mass[: -len(LATEST)])
    assert middle.std() == pytest.approx(LOG_SPREAD, rel=0.05)
    assert middle.mean() == pytest.approx(np.log(MIDDLE), abs=0.03)
    for place in range(1, len(LATEST) + 1):
        draws = [SyntheticAttention(1).of(request(64, 9, i), 64, 1).groups[0][-place] for i in range(200)]
        assert np.median(draws) == pytest.approx(MIDDLE * LATEST[-place], rel=0.1)


def test_a_chunk_keeps_its_weight_while_the_context_grows() -> None:
    attention, one = SyntheticAttention(2), request(100, 400)
    short, long = attention.of(one, 300, 1), attention.of(one, 500, 1)
    for before, after in zip(short.groups, long.groups, strict=True):
        assert (before[:-4] == after[: len(before) - 4]).all()
    assert (short.groups[0] != short.groups[1]).any()


def test_contexts_shorter_than_the_latest_chunks() -> None:
    assert SyntheticAttention(1).of(request(5, 5), 1, 1).groups[0].shape == (1,)


def test_the_same_in_a_copy_and_another_for_another_request_or_seed() -> None:
    found = SyntheticAttention(1).of(request(), 900, 1).groups[0]
    attention, copy = pickle.loads(pickle.dumps((SyntheticAttention(1), request())))  # made here
    assert (attention.of(copy, 900, 1).groups[0] == found).all()
    assert (SyntheticAttention(1).of(request(index=1), 900, 1).groups[0] != found).any()
    assert (SyntheticAttention(1, seed=1).of(request(), 900, 1).groups[0] != found).any()


def simulated(eviction: str) -> Simulator:
    options: dict[str, Any] = {"eviction": eviction, "keep_tokens": KEEP, "block_size": 64}
    trace = from_requests("test", [TraceRequest(0.0, 700, 120), TraceRequest(0.2, 600, 60), TraceRequest(0.2, 50, 20)])
    groups = [GroupSpec("full", (0, 1), KVShape(2, 1, 16, 2))]
    simulator = Simulator(groups, MODEL, SimOptions(1 << 20, 1000, options), TraceFeed(trace))
    simulator.drain()
    return simulator


def test_eviction_by_attention_keeps_what_is_attended_and_as_much_as_a_window() -> None:
    heavy, window = (simulated(eviction).stats().counters for eviction in ("heavy_hitter", "window"))
    assert heavy.evicted_by_attention_tokens == heavy.evicted_tokens > 0
    assert window.evicted_by_attention_tokens == 0
    # Less than a chunk more than asked for is kept by either, per sequence.
    assert abs(heavy.evicted_tokens - window.evicted_tokens) < 2 * 16
    assert heavy.recoded_tokens > window.recoded_tokens  # what is kept is scattered, so blocks are split
