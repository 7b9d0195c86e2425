from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from engine.admission import AdmissionError
from engine.plan import StepPlan
from engine.request import CachePolicy, FinishReason, Request, SamplingParams
from engine.request_delta import RequestDelta
from engine.stats import EngineStats
from engine.tunable_state import Patch

Build = Callable[..., Any]


def ask(name: str, prompt_tokens: int = 20, max_tokens: int = 8, *, arrival_ns: int = 0, **cache: Any) -> Request:
    prompt = [(len(name) * 7 + i * 13 + ord(name[0])) % 256 for i in range(prompt_tokens)]
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(name, prompt, params, arrival_ns, CachePolicy(**cache))


def run(engine: Any, limit: int = 2000) -> dict[str, list[RequestDelta]]:
    """Step until idle; deltas by request."""
    seen: dict[str, list[RequestDelta]] = {}
    for _ in range(limit):
        if not engine.core.has_work:
            return seen
        for delta in engine.core.step():
            seen.setdefault(delta.request_id, []).append(delta)
        engine.cache.check_integrity()
    raise AssertionError(f"not idle after {limit} steps")


def tokens(deltas: list[RequestDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def test_requests_complete_with_one_final_delta(new_engine: Build) -> None:
    engine = new_engine()
    for name in "abc":
        engine.core.add(ask(name, max_tokens=5))
    seen = run(engine)
    for name in "abc":
        assert len(tokens(seen[name])) == 5
        assert [delta.finish_reason for delta in seen[name]] == [None] * 4 + [FinishReason.LENGTH]
    counters = engine.core.stats().counters
    assert (counters.requests_offered, counters.requests_admitted, counters.requests_completed) == (3, 3, 3)
    assert (counters.generation_tokens, counters.prompt_tokens, counters.offered_prompt_tokens) == (15, 60, 60)
    assert counters.prefill_tokens_computed == 60
    assert counters.decode_tokens_computed == 12


def test_latencies_come_from_the_clock(new_engine: Build) -> None:
    """Case I.34: chunked prefill, first token at 0.30 s, later ones 0.05 s apart."""
    engine = new_engine(max_num_batched_tokens=64)
    begin_ns = engine.clock.now_ns()
    prompts = iter([0.10, 0.10, 0.10, *[0.05] * 9])
    engine.runner.before = lambda _plan: engine.clock.advance_s(next(prompts))
    engine.core.add(ask("a", prompt_tokens=150, max_tokens=10, arrival_ns=begin_ns))
    run(engine)
    stats = engine.core.stats()
    assert stats.ttft.sum_s == pytest.approx(0.30, abs=1e-3)
    assert stats.ttft.count == 1
    assert stats.itl.sum_s == pytest.approx(0.45, abs=1e-3)
    assert stats.itl.count == 9
    assert stats.e2e.sum_s == pytest.approx(0.75, abs=1e-3)
    distributions = engine.core.distributions()
    exact = dict(zip((*distributions.ttft.bounds, float("inf")), distributions.ttft.counts, strict=True))
    assert {bound: count for bound, count in exact.items() if count} == {0.5: 1}
    gaps = dict(zip((*distributions.itl.bounds, float("inf")), distributions.itl.counts, strict=True))
    assert sum(gaps.values()) == 9
    assert sum(count for bound, count in gaps.items() if 0.025 < bound <= 0.075) == 9


def test_ttft_includes_queueing(new_engine: Build) -> None:
    engine = new_engine(max_num_seqs=1)
    engine.runner.before = lambda _plan: engine.clock.advance_s(0.1)
    now = engine.clock.now_ns()
    engine.core.add(ask("a", max_tokens=5, arrival_ns=now))
    engine.core.add(ask("b", max_tokens=1, arrival_ns=now))
    run(engine)
    stats = engine.core.stats()
    assert stats.ttft.sum_s == pytest.approx(0.1 + 0.6)
    assert stats.queue.sum_s == pytest.approx(0.5)
    assert stats.queue.count == 2


def test_step_time_is_shared_out(new_engine: Build) -> None:
    engine = new_engine()
    engine.runner.before = lambda _plan: engine.clock.advance_s(0.2)
    engine.core.add(ask("a", prompt_tokens=30, max_tokens=3))
    run(engine)
    counters = engine.core.stats().counters
    assert counters.steps == 3
    assert counters.step_time_ns == 600_000_000
    assert counters.prefill_time_ns == 200_000_000
    assert counters.decode_time_ns == 400_000_000
    assert (counters.kv_bytes_read, counters.kv_bytes_written) == (3000, 30)


def test_a_failing_step_fails_its_requests_only(new_engine: Build) -> None:
    engine = new_engine(max_num_seqs=2)
    for name in "abc":
        engine.core.add(ask(name))

    def explode(_plan: StepPlan) -> None:
        engine.runner.before = lambda _plan: None
        raise RuntimeError("kernel launch failed")

    engine.runner.before = explode
    seen = run(engine)
    for name in "ab":
        assert [delta.finish_reason for delta in seen[name]] == [FinishReason.ERROR]
        assert "kernel launch failed" in str(seen[name][0].error)
    assert len(tokens(seen["c"])) == 8
    counters = engine.core.stats().counters
    assert (counters.requests_failed, counters.requests_completed) == (2, 1)
    assert engine.core.broken is None
    assert engine.core.stats().gauges.kv_used_bytes == 0


def test_a_runner_that_always_fails_stops_the_engine(new_engine: Build) -> None:
    engine = new_engine(max_num_seqs=1)

    def explode(_plan: StepPlan) -> None:
        raise RuntimeError("device lost")

    engine.runner.before = explode
    for name in "abcdefgh":
        engine.core.add(ask(name))
    seen = run(engine)
    assert set(seen) == set("abcdefgh")
    assert all(deltas[-1].finish_reason is FinishReason.ERROR for deltas in seen.values())
    assert "device lost" in str(engine.core.broken)
    with pytest.raises(AdmissionError, match="device lost"):
        engine.core.add(ask("z"))


def test_a_failing_scheduler_leaves_the_engine_usable(new_engine: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = new_engine()
    engine.core.add(ask("a"))
    with monkeypatch.context() as patched:
        patched.setattr(engine.scheduler, "schedule", lambda: 1 / 0)
        assert [delta.finish_reason for delta in engine.core.step()] == [FinishReason.ERROR]
    engine.core.add(ask("b"))
    assert len(tokens(run(engine)["b"])) == 8


def test_abort_frees_within_one_step(new_engine: Build) -> None:
    engine = new_engine()
    engine.core.add(ask("a", prompt_tokens=300, max_tokens=50, use_prefix_cache=False))
    engine.core.add(ask("b", max_tokens=4))
    engine.core.step()
    assert engine.core.abort("a")
    assert not engine.core.abort("a")
    seen = run(engine)
    assert set(seen) == {"b"}
    stats = engine.core.stats()
    assert stats.gauges.kv_used_bytes == 0
    assert (stats.counters.requests_aborted, stats.counters.requests_completed) == (1, 1)


def test_a_stop_string_counts_as_completed(new_engine: Build) -> None:
    engine = new_engine()
    engine.core.add(ask("a", max_tokens=50))
    engine.core.step()
    assert engine.core.finish("a")
    stats = engine.core.stats()
    assert (stats.counters.requests_completed, stats.counters.requests_aborted) == (1, 0)
    assert stats.gauges.kv_used_bytes == 0


def test_offered_load_includes_the_rejected(new_engine: Build) -> None:
    engine = new_engine(max_waiting=2)
    engine.core.add(ask("0"))
    engine.core.add(ask("1"))
    for name in "234":
        with pytest.raises(AdmissionError) as caught:
            engine.core.add(ask(name))
        assert caught.value.kind == "queue_full"
    counters = engine.core.stats().counters
    assert (counters.requests_offered, counters.requests_rejected) == (5, 3)
    with pytest.raises(ValueError, match="in use"):
        engine.core.add(ask("0"))


def test_larger_than_the_pool_is_refused_and_does_not_block_the_queue(new_engine: Build) -> None:
    """Case G.24."""
    engine = new_engine(pool_tokens=1024, max_model_len=4096)
    with pytest.raises(AdmissionError) as caught:
        engine.core.add(ask("big", prompt_tokens=1024 + 16, max_tokens=1))
    assert caught.value.kind == "can_never_fit"
    engine.core.add(ask("small"))
    assert len(tokens(run(engine)["small"])) == 8


def test_a_waiting_request_that_stops_fitting_is_failed(new_engine: Build) -> None:
    """Case G.24 after a change: whatever was accepted either runs or ends with an error, in a bounded time."""
    engine = new_engine(pool_tokens=2048, max_model_len=4096, kv_format="int4", block_size=32, recent_tokens=32)
    largest = 4000
    while largest:
        try:
            engine.core.add(ask("big", prompt_tokens=largest, max_tokens=2))
            break
        except AdmissionError:
            largest -= 100
    engine.core.patch(Patch({"kv_format": "native", "block_size": 256}, "test"))
    engine.core.add(ask("small"))
    seen = run(engine, limit=400)
    assert len(tokens(seen["small"])) == 8
    assert seen["big"][-1].finish_reason in {FinishReason.ERROR, FinishReason.LENGTH}


@pytest.mark.parametrize("pool_tokens", [1024, 1536])
def test_preemption_loses_and_repeats_nothing(new_engine: Build, pool_tokens: int) -> None:
    """Case D.13 at the core: the same ids as with a large pool, exactly max_tokens, no delta twice."""
    names = [f"{c}{i}" for i, c in enumerate("abcdefgh")]
    results = []
    for pool in (1 << 16, pool_tokens):
        engine = new_engine(pool_tokens=pool)
        for name in names:
            engine.core.add(ask(name, prompt_tokens=70, max_tokens=120, use_prefix_cache=False))
        seen = run(engine)
        results.append({name: tokens(deltas) for name, deltas in seen.items()})
        counters = engine.core.stats().counters
        if pool == pool_tokens:
            assert counters.preemptions >= 2
            assert counters.recomputed_tokens > 0
        else:
            assert (counters.preemptions, counters.recomputed_tokens) == (0, 0)
    assert results[0] == results[1]
    assert all(len(ids) == 120 for ids in results[1].values())


def test_preempted_prompts_are_scored_once(new_engine: Build) -> None:
    engine = new_engine(pool_tokens=1024, max_num_batched_tokens=64)
    prompts = {}
    for i, name in enumerate("abcdef"):
        request = ask(name, prompt_tokens=150 + i, max_tokens=120)
        request.params = replace(request.params, prompt_logprobs=0)
        prompts[name] = request.prompt_ids
        engine.core.add(request)
    seen = run(engine)
    assert engine.core.stats().counters.preemptions >= 1
    for name, prompt in prompts.items():
        scored = [entry.token_id for delta in seen[name] for entry in delta.prompt_logprobs]
        assert scored == prompt[1:]


def test_prefix_lookups_count_once(new_engine: Build) -> None:
    """Case I.32: many scheduling attempts, one count."""
    engine = new_engine(max_num_seqs=1)
    first, second = ask("a", prompt_tokens=64, max_tokens=12), ask("b", prompt_tokens=64, max_tokens=1)
    second.prompt_ids = list(first.prompt_ids)
    engine.core.add(first)
    engine.core.add(second)
    run(engine)
    counters = engine.core.stats().counters
    assert counters.prefix_cache_queries == 128
    assert 0 < counters.prefix_cache_hits < 64
    assert counters.prefix_cache_hits == second.num_cached_tokens


def test_usage_does_not_creep_up(new_engine: Build) -> None:
    """Case G.27, scaled: 10 rounds of 30 requests, idle in between; the gauge agrees with the allocator."""
    engine = new_engine(pool_tokens=4096)
    used = []
    for number in range(10):
        for i in range(30):
            name = f"{chr(97 + i % 26)}{number}-{i}"
            engine.core.add(ask(name, prompt_tokens=5 + 37 * i % 200, max_tokens=1 + i % 7))
        run(engine)
        gauges = engine.core.stats().gauges
        used.append(gauges.kv_used_bytes)
        assert gauges.running == gauges.waiting == 0
        assert gauges.kv_usage == 0
        assert sum(row.bytes for row in gauges.resident) == gauges.kv_used_bytes + gauges.kv_cached_bytes
    assert used == [0] * 10


def test_stats_survive_json(new_engine: Build) -> None:
    engine = new_engine()
    engine.core.add(ask("a"))
    run(engine)
    stats = engine.core.stats()
    assert EngineStats.from_json(stats.to_json()) == stats


def test_idle_engine_recodes_in_the_background(new_engine: Build) -> None:
    engine = new_engine(core_options={"idle_recode_tokens": 64})
    engine.core.add(ask("a", prompt_tokens=400, max_tokens=1))
    run(engine)
    engine.core.patch(Patch({"kv_format": "int8", "block_size": 32}, "test"))
    assert engine.core.stats().gauges.converged_fraction < 1
    calls = 0
    while engine.core.has_background_work:
        engine.core.background()
        engine.cache.check_integrity()
        calls += 1
        assert calls < 200
    assert calls > 2
    assert engine.core.stats().gauges.converged_fraction == 1
    assert engine.core.stats().counters.recoded_tokens > 0


def test_a_failing_recode_harms_no_request(new_engine: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = new_engine()
    engine.core.add(ask("a", prompt_tokens=400, max_tokens=30))
    engine.core.step()

    def explode(_batches: object) -> None:
        raise RuntimeError("no such kernel")

    with monkeypatch.context() as patched:
        patched.setattr(engine.runner, "recode", explode)
        engine.core.patch(Patch({"kv_format": "int8"}, "test"))
        assert len(tokens(run(engine)["a"])) >= 29
        while engine.core.has_background_work:
            engine.core.background()
    assert engine.core.broken is None


def test_recoding_takes_a_share_of_the_steps_time_and_none_of_its_own_account(
    new_engine: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes 10 ms, a recoded token 10 us: a fifth of the step pays for 200 of them."""
    engine = new_engine(core_options={"recode_share": 0.2}, pool_tokens=16384)
    engine.runner.before = lambda _plan: engine.clock.advance_s(0.010)
    spent: list[int] = []

    def recode(batches: list[Any]) -> None:
        spent.append(sum(batch.num_tokens for batch in batches))
        engine.clock.advance_s(10e-6 * spent[-1])

    monkeypatch.setattr(engine.runner, "recode", recode)
    for name in "abcdefg":
        engine.core.add(ask(name, prompt_tokens=900, max_tokens=1))
    run(engine)
    engine.core.add(ask("z", prompt_tokens=20, max_tokens=80))
    engine.core.step()
    engine.core.patch(Patch({"kv_format": "int8"}, "test"))
    before = engine.core.stats().counters
    run(engine)
    after = engine.core.stats().counters
    assert spent[0] == 64
    assert set(spent[1:30]) == {192}, "whole units of 32"
    assert max(spent) == 192
    assert sum(spent) > 5000
    assert after.recode_time_ns == 10_000 * sum(spent)
    assert after.step_time_ns - before.step_time_ns == 10_000_000 * (after.steps - before.steps)
