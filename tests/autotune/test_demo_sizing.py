"""Sizing: on any machine, the peaks are more than a native cache and less than a compressed one can carry."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.demo.probe import fit_step, mean_step_s
from autotune.demo.report import load_lines
from autotune.demo.sizing import (
    LEAST_RESIDENT_TOKENS,
    LEAST_TBT_S,
    LEAST_TTFT_S,
    LONGEST_REQUEST_S,
    Memory,
    Rates,
    SizedLoad,
    length_scale,
    size,
)
from autotune.replay.records import RequestRecord
from envs.workload.trace import TraceRequest, from_requests

TINY = Memory(
    native_token_bytes=3072,
    small_token_bytes=912,
    always_native_tokens=80,
    slab_tokens=256,
    least_slabs=8,
    max_model_len=4096,
)
LAPTOP = Rates(5000, 0.0042, 0.00025, 0.09, 0.0045, 448)
SLOW = Rates(300, 0.08, 0.01, 1.5, 0.09, 448)
FAST = Rates(80_000, 0.003, 0.00005, 0.008, 0.003, 448)


def sized(rates: Rates, memory: Memory = TINY, prompt: float = 330, output: float = 740) -> SizedLoad:
    scale = length_scale(rates, prompt, output, memory.max_model_len)
    return size(rates, memory, scale, prompt / scale, output / scale)


@pytest.mark.parametrize("rates", [LAPTOP, SLOW, FAST], ids=["laptop", "slow", "fast"])
def test_memory_is_what_runs_out(rates: Rates) -> None:
    load = sized(rates)
    assert load.native_limit_rps * 1.15 < load.peak_rps < load.small_limit_rps
    assert load.small_running > 1.5 * load.native_running
    # Between the peaks the native cache can breathe: the pattern's calm is a quarter and an eighth of its peaks.
    assert load.peak_rps / 4 < 0.8 * load.native_limit_rps
    # Few enough that memory shows, and the pool really holds them.
    resident = load.mean_prompt_tokens + load.mean_output_tokens / 2
    assert load.native_running * resident <= load.pool_tokens
    assert load.pool_bytes == (load.pool_tokens + TINY.slab_tokens) * TINY.native_token_bytes


def test_slow_machines_get_shorter_requests() -> None:
    slower = Rates(2000, 0.02, 0.002, 0.25, 0.02, 448)
    assert length_scale(slower, 330, 740, 1 << 20) == pytest.approx(slower.alone_s(330, 740) / LONGEST_REQUEST_S)
    assert length_scale(SLOW, 330, 740, 4096) == pytest.approx(700 / LEAST_RESIDENT_TOKENS)
    assert length_scale(FAST, 330, 740, 1 << 20) == 1.0
    assert length_scale(FAST, 4096, 4096, 4096) == 10.0


def test_targets_follow_the_idle_latencies() -> None:
    slow, fast = sized(SLOW), sized(FAST)
    assert slow.ttft_target_s == pytest.approx(15.0)
    assert slow.tbt_target_s == pytest.approx(
        2 * (slow.native_running * SLOW.per_sequence_s + SLOW.step_s + slow.mean_prompt_tokens / 300)
    )
    assert fast.ttft_target_s == LEAST_TTFT_S
    assert (slow.ttft_why, fast.ttft_why) == ("10 x idle", "the least taken")
    assert slow.tbt_why == "2 x a step that also takes in a prompt"


def test_targets_say_where_they_come_from() -> None:
    at_once = Rates(1e6, 1e-4, 1e-6, 0.001, 1e-4, 448)
    load = size(at_once, TINY, 1.0, 100, 300)
    assert (load.tbt_target_s, load.tbt_why) == (LEAST_TBT_S, "the least taken")
    longer = size(SLOW, TINY, 1.0, 896, 300)
    assert longer.ttft_target_s == pytest.approx(30.0)
    assert longer.ttft_why == "10 x idle, for a prompt 2 times as long"
    line = load_lines(sized(FAST), from_requests("t", [TraceRequest(0.0, 9, 9)]))[-1]
    assert "TTFT <= 250 ms (the least taken)" in line
    assert "x idle" not in line
    assert "computed again" in load_lines(sized(FAST), from_requests("t", [TraceRequest(0.0, 9, 9)]))[-2]


@given(
    prefill=st.floats(10, 1e6),
    step=st.floats(1e-4, 5),
    share=st.floats(0.005, 1.0),
    small=st.floats(0.1, 0.9),
    prompt=st.floats(1, 4000),
    output=st.floats(1, 4000),
)
def test_any_machine_gets_a_load(
    prefill: float, step: float, share: float, small: float, prompt: float, output: float
) -> None:
    rates = Rates(prefill, step, step * share, 0.1, step, 448)
    memory = Memory(1000.0, 1000.0 * small, 80, 256, 8, 4096)
    load = sized(rates, memory, prompt, output)
    assert load.native_limit_rps <= load.peak_rps <= load.small_limit_rps
    assert 1 <= load.native_running <= load.small_running
    assert load.pool_tokens >= 7 * 256
    assert load.ttft_target_s > 0
    assert load.tbt_target_s > 0


def test_step_times_are_fitted_and_never_negative() -> None:
    fixed, each = fit_step({1: 0.011, 4: 0.014, 16: 0.026})
    assert (fixed, each) == (pytest.approx(0.010), pytest.approx(0.001))
    fixed, each = fit_step({1: 0.02, 4: 0.019, 16: 0.01})
    assert fixed > 0
    assert each > 0


def served(*times_s: float) -> RequestRecord:
    return RequestRecord(0, 0.0, 64, len(times_s), token_times_s=array("d", times_s))


def test_a_step_is_the_mean_gap_while_all_run() -> None:
    early = served(0.0, 1.0, 2.0, 3.0, 4.0)
    late = served(1.5, 2.5, 3.5, 4.5)
    assert mean_step_s([early, late]) == pytest.approx(1.0)


def test_tokens_that_come_in_bursts_do_not_make_a_machine_look_fast() -> None:
    """A server that is behind sends four tokens at once: their median gap is nothing, their mean is what it takes."""
    behind = served(*(4.0 * (token // 4) for token in range(25)))
    assert mean_step_s([behind]) == pytest.approx(1.0)


def test_tokens_that_all_come_at_once_still_take_time() -> None:
    """To a client that had no processor for a while."""
    assert 0 < mean_step_s([served(2.0, 2.0, 2.0, 2.0)]) < 1e-3
