"""Who runs when: budgets, chunks, order, preemption, cancellation, refusals, and that nothing ever hangs."""

from __future__ import annotations

from itertools import pairwise

import pytest
from cache_world import World, ids

from engine.admission import AdmissionError
from engine.events import RequestAdmitted, RequestFinished, RequestPreempted, StepScheduled
from engine.plan import SequenceOutput, StepPlan, TokenLogprobs
from engine.request import FinishReason, Request, RequestStatus, SamplingParams


def refusal(world: World, request: Request) -> AdmissionError:
    with pytest.raises(AdmissionError) as caught:
        world.scheduler.add(request)
    assert world.scheduler.get(request.request_id) is not request
    return caught.value


# -- budgets and order -----------------------------------------------------------------------------------------------


def test_prompts_are_chunked_to_the_budget_and_sample_at_the_end() -> None:
    world = World(values={"max_num_batched_tokens": 64})
    request = world.add(ids(1, 150), max_tokens=3)
    chunks = [[(s.start, s.num_tokens, s.samples) for s in world.step().sequences] for _ in range(5)]
    assert chunks == [
        [(0, 64, False)],
        [(64, 64, False)],
        [(128, 22, True)],
        [(150, 1, True)],
        [(151, 1, True)],
    ]
    assert request.finish_reason is FinishReason.LENGTH
    assert len(request.output_ids) == 3
    assert not world.scheduler.has_work


def test_decodes_come_first_and_prefill_takes_the_rest() -> None:
    world = World(values={"max_num_batched_tokens": 64}, num_slabs=10)
    short = [world.add(ids(i, 10), max_tokens=50) for i in range(3)]
    world.step()
    long = world.add(ids(9, 500), max_tokens=5)
    for _ in range(4):
        plan = world.step()
        assert [s.request for s in plan.sequences] == [*short, long]
        assert [s.is_decode for s in plan.sequences] == [True, True, True, False]
        assert plan.num_tokens == 64
    events = world.events.of(StepScheduled)
    assert (events[-1].num_decode_tokens, events[-1].num_prefill_tokens) == (3, 61)


def test_a_prompts_last_token_alone_is_listed_with_the_prefills() -> None:
    world = World(values={"max_num_batched_tokens": 64})
    first = world.add(ids(1, 65), max_tokens=5)
    world.step()
    second = world.add(ids(2, 3), max_tokens=5)
    world.step()
    assert len(first.output_ids) == len(second.output_ids) == 1
    third = world.add(ids(1, 64) + ids(3, 1), max_tokens=5)
    plan = world.step()
    assert [(s.request, s.num_tokens) for s in plan.sequences] == [(first, 1), (second, 1), (third, 1)]
    assert [s.is_decode for s in plan.sequences] == [True, True, False]


def test_sequence_limit_holds_and_lowering_it_drains() -> None:
    world = World(values={"max_num_seqs": 4})
    requests = [world.add(ids(i, 20), max_tokens=10 + 10 * i) for i in range(6)]
    world.step()
    assert list(world.scheduler.running) == requests[:4]
    assert list(world.scheduler.waiting) == requests[4:]
    world.apply(max_num_seqs=1)
    seen = []
    while world.scheduler.has_work:
        world.step()
        seen.append(len(world.scheduler.running))
    assert max(seen[:9]) == 4  # nobody was stopped
    assert all(later <= max(sooner, 1) for sooner, later in pairwise(seen))
    assert [len(request.output_ids) for request in requests] == [10, 20, 30, 40, 50, 60]
    assert world.counters.preemptions == 0


def test_more_decodes_than_budget_take_turns() -> None:
    world = World(values={"max_num_batched_tokens": 256, "max_num_seqs": 128}, num_slabs=32)
    requests = [world.add(ids(i, 2), max_tokens=200, use_prefix_cache=False) for i in range(100)]
    world.step()
    world.apply(max_num_batched_tokens=64)
    for _ in range(60):
        assert len(world.step().sequences) == 64
    counts = [len(request.output_ids) for request in requests]
    assert max(counts) - min(counts) <= 1


def test_admission_is_in_order_of_arrival_without_overtaking() -> None:
    world = World(num_slabs=5)  # 1024 tokens
    running = world.add(ids(1, 600), max_tokens=20)
    for _ in range(2):
        world.step()
    big, small = world.add(ids(2, 600), max_tokens=5), world.add(ids(3, 10), max_tokens=5)
    world.step()
    assert list(world.scheduler.running) == [running]
    assert list(world.scheduler.waiting) == [big, small]
    world.run(check=True)
    order = [event.request_id for event in world.events.of(RequestAdmitted)]
    assert order == [running.request_id, big.request_id, small.request_id]


def test_watermark_keeps_room_for_those_that_run() -> None:
    for watermark, admitted in ((0.0, 2), (0.2, 1)):
        world = World(num_slabs=5, watermark=watermark)
        world.add(ids(1, 500), max_tokens=20)
        world.add(ids(2, 400), max_tokens=20)
        world.step()
        world.step()
        assert len(world.scheduler.running) == admitted
        world.run()


def test_a_prompt_is_admitted_only_if_it_fits_beside_what_others_still_need() -> None:
    world = World(num_slabs=5, values={"max_num_batched_tokens": 64})
    world.add(ids(1, 700), max_tokens=2)
    world.add(ids(2, 400), max_tokens=2)
    for _ in range(3):
        world.step()
        assert len(world.scheduler.running) == 1
    world.run()
    assert world.counters.preemptions == 0


# -- refusals --------------------------------------------------------------------------------------------------------


def test_queue_is_bounded() -> None:
    world = World(max_waiting=2)
    for i in range(2):
        world.add(ids(i, 10))
    assert refusal(world, world.request(ids(3, 10))).kind == "queue_full"
    world.step()  # both run now
    world.add(ids(4, 10))
    counters = world.counters
    assert (counters.requests_offered, counters.requests_rejected) == (4, 1)
    world.run()
    assert counters.requests_completed == counters.requests_admitted == 3


@pytest.mark.parametrize("max_tokens", [-1, -100])
def test_nonsense_is_refused_alone(max_tokens: int) -> None:
    world = World()
    assert refusal(world, world.request([], 5)).kind == "invalid"
    assert refusal(world, world.request([1], max_tokens)).kind == "invalid"
    assert "native, int8" in refusal(world, world.request([1], 5, kv_format_floor="fp8")).message
    good = world.add([1], max_tokens=2)
    twin = world.request([2], 2)
    twin.request_id = good.request_id
    assert refusal(world, twin).kind == "invalid"
    world.run(check=True)
    assert len(good.output_ids) == 2
    assert (world.counters.requests_offered, world.counters.requests_rejected) == (5, 4)


def test_beyond_the_model_or_the_pool_is_refused_at_once_and_holds_up_nobody() -> None:
    """Case G.24."""
    world = World(num_slabs=5, max_model_len=2000)
    assert refusal(world, world.request(ids(1, 2000), 1)).kind == "too_long"
    error = refusal(world, world.request(ids(1, 1024 + 16), 1))
    assert error.kind == "can_never_fit"
    assert "1024" in error.message
    assert refusal(world, world.request(ids(1, 1000), 100)).kind == "can_never_fit"
    exact = world.add(ids(1, 1000), max_tokens=25)  # the last token's KV is never computed
    short = world.add(ids(2, 20), max_tokens=2)
    world.run(check=True)
    assert len(exact.output_ids) == 25
    assert len(short.output_ids) == 2


def test_what_no_longer_fits_ends_in_an_error_instead_of_hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case G.24, after the pool has shrunk: one waits, one runs, both are too long now; a short one gets through."""
    world = World(num_slabs=6)
    running = world.add(ids(1, 600), max_tokens=400)
    world.step()
    world.step()
    waiting = world.add(ids(2, 900), max_tokens=2)
    short = world.add(ids(3, 20), max_tokens=2)
    pool = world.cache._pools[0]
    while pool.arena.num_free_slabs:  # somebody takes all the rest
        for _ in range(16):
            pool.take(pool.blocks[0].block_class, 0, keep_slabs=0)
    monkeypatch.setattr(world.cache, "max_sequence_tokens", lambda: 500)
    for _ in range(200):
        world.step()
    assert running.finish_reason is FinishReason.ERROR
    assert waiting.finish_reason is FinishReason.ERROR
    assert short.finish_reason is FinishReason.LENGTH
    assert {r.request_id for r in world.finished} == {r.request_id for r in (running, waiting, short)}
    assert world.counters.requests_failed == 2
    assert not world.scheduler.running
    assert not world.scheduler.waiting


def test_max_model_len_ends_a_request() -> None:
    world = World(max_model_len=40)
    request = world.add(ids(1, 30), max_tokens=50)
    world.run()
    assert request.finish_reason is FinishReason.LENGTH
    assert request.num_tokens == 40


def test_no_output_tokens_at_all() -> None:
    world = World()
    request = world.add(ids(1, 700), max_tokens=0, prompt_logprobs=0)
    world.run(check=True)
    assert request.finish_reason is FinishReason.LENGTH
    assert request.output_ids == []
    assert world.counters.prefill_tokens_computed == 700


def test_stop_tokens() -> None:
    world = World(eos=frozenset({0, 1, 2}))
    plain = world.add(ids(1, 20), max_tokens=9)
    request = world.request(ids(2, 20), 9)
    request.params = SamplingParams(max_tokens=9, ignore_eos=True)
    world.scheduler.add(request)
    chosen = world.request(ids(3, 20), 9)
    chosen.params = SamplingParams(max_tokens=9, ignore_eos=True, stop_token_ids=frozenset({0, 1, 2}))
    world.scheduler.add(chosen)
    world.run()
    assert (plain.finish_reason, len(plain.output_ids)) == (FinishReason.STOP, 1)
    assert (request.finish_reason, len(request.output_ids)) == (FinishReason.LENGTH, 9)
    assert (chosen.finish_reason, len(chosen.output_ids)) == (FinishReason.STOP, 1)


# -- preemption ------------------------------------------------------------------------------------------------------


def test_the_youngest_is_preempted_resumed_first_and_loses_nothing() -> None:
    """Case D.13: >= 2 preemptions of one request; exact counts, no token twice, recomputation counted apart."""
    world = World(num_slabs=4, recode_tokens=0)  # 768 tokens
    requests = [world.add(ids(i, 150), max_tokens=350, use_prefix_cache=False) for i in range(5)]
    late = world.add(ids(9, 100), max_tokens=3, use_prefix_cache=False)
    produced: dict[str, list[int]] = {request.request_id: [] for request in (*requests, late)}
    while world.scheduler.has_work:
        was_waiting = late.status is RequestStatus.WAITING
        plan = world.scheduler.schedule()
        if was_waiting and late.status is RequestStatus.RUNNING:
            assert not [request for request in requests if request.status is RequestStatus.PREEMPTED]
        outputs = world.run_plan(plan)
        for output in outputs:
            if output.token_id is not None:
                produced[output.request.request_id].append(output.token_id)
        world.finished += world.scheduler.update(plan, outputs)
        world.check()
    assert requests[0].num_preemptions == 0
    assert max(request.num_preemptions for request in requests) >= 2
    for request in requests:
        assert len(request.output_ids) == 350
        assert request.output_ids == produced[request.request_id]
    preempted = [event.request_id for event in world.events.of(RequestPreempted)]
    assert set(preempted) <= {request.request_id for request in requests[1:]}
    assert world.counters.preemptions == len(preempted) == sum(r.num_preemptions for r in requests)
    assert world.counters.recomputed_tokens == sum(r.num_recomputed_tokens for r in requests) > 400
    # 5 x (150 + 349) + 102 tokens once each, the rest again.
    computed = world.counters.prefill_tokens_computed + world.counters.decode_tokens_computed
    assert computed == 5 * 499 + 102 + world.counters.recomputed_tokens
    assert world.counters.prompt_tokens == 850
    assert [event.request_id for event in world.events.of(RequestAdmitted) if not event.resumed][-1] == late.request_id


def test_a_preempted_request_finds_its_own_prefix_again() -> None:
    world = World(num_slabs=4, recode_tokens=0)
    requests = [world.add(ids(i, 200), max_tokens=220) for i in range(3)]
    world.run(check=True)
    victim = max(requests, key=lambda request: request.num_preemptions)
    assert victim.num_preemptions >= 1
    assert world.counters.prefix_cache_hits == 0  # resuming is not a hit
    assert victim.num_cached_tokens == 0
    assert [len(request.output_ids) for request in requests] == [220] * 3


def test_recomputed_prompt_logprobs_are_not_reported_twice() -> None:
    world = World(num_slabs=4, values={"max_num_batched_tokens": 64})
    old = world.add(ids(1, 500), max_tokens=260)
    reported: dict[str, int] = {}

    def step() -> None:
        plan = world.scheduler.schedule()
        outputs = world.run_plan(plan)
        for sequence, output in zip(plan.sequences, outputs, strict=True):
            last = min(sequence.start + sequence.num_tokens, len(sequence.request.prompt_ids) - 1)
            if sequence.request.params.prompt_logprobs is not None:
                output.prompt_logprobs = [TokenLogprobs(p + 1, -1.0, 1) for p in range(sequence.start, last)]
        world.finished += world.scheduler.update(plan, outputs)
        for output in outputs:
            for entry in output.prompt_logprobs:
                reported[entry.token_id] = reported.get(entry.token_id, 0) + 1

    while len(old.output_ids) < 2:
        step()
    young = world.add(ids(2, 200), max_tokens=60, prompt_logprobs=0)
    while world.scheduler.has_work:
        step()
    assert young.num_preemptions >= 1
    assert reported == dict.fromkeys(range(1, 200), 1)


def test_the_oldest_always_ends_even_when_all_want_everything() -> None:
    world = World(num_slabs=3, recode_tokens=64)  # 512 tokens
    requests = [world.add(ids(i, 100), max_tokens=400) for i in range(5)]
    world.run(20_000, check=False)
    assert [len(request.output_ids) for request in requests] == [400] * 5
    finished = [event.request_id for event in world.events.of(RequestFinished)]
    assert finished[0] == requests[0].request_id


@pytest.mark.parametrize("recode", [0, 128])
def test_switching_all_the_time_in_a_full_pool_ends_too(recode: int) -> None:
    world = World(num_slabs=4, recode_tokens=recode)
    requests = [world.add(ids(i, 300), max_tokens=400) for i in range(4)]
    sizes = [16, 256, 32, 128, 64]
    step = 0
    while world.scheduler.has_work:
        step += 1
        assert step < 8000
        if step % 37 == 0:
            world.apply(block_size=sizes[step // 37 % 5], kv_format=["native", "int4"][step // 400 % 2])
        world.step()
    world.check()
    assert [len(request.output_ids) for request in requests] == [400] * 4


def test_a_lone_request_that_wasted_room_on_mixed_sizes_starts_over_and_ends() -> None:
    world = World(num_slabs=3, recode_tokens=0)
    request = world.add(ids(1, 40), max_tokens=470)
    step = 0
    while world.scheduler.has_work:
        step += 1
        assert step < 3000
        if step < 400 and step % 40 == 0:
            world.apply(block_size=[256, 16][step // 40 % 2])
        world.step()
    assert len(request.output_ids) == 470


def test_a_lone_request_is_not_starved_by_its_own_recoding() -> None:
    """Half-filled int4 slabs must not take the room that admission has promised."""
    values = {"kv_format": "int4", "max_num_batched_tokens": 128}
    world = World(num_slabs=3, recent_tokens=64, recode_tokens=64, values=values)
    request = world.add(ids(1, 447), max_tokens=39)
    world.run(500, check=True)
    assert request.num_preemptions == 0
    assert len(request.output_ids) == 39


# -- cancellation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["waiting", "prefilling", "decoding", "preempted"])
def test_cancelled_in_any_state(state: str) -> None:
    world = World(num_slabs=4, values={"max_num_batched_tokens": 64}, recode_tokens=0)
    other = world.add(ids(1, 300), max_tokens=300, use_prefix_cache=False)
    request = world.add(ids(2, 200), max_tokens=300, use_prefix_cache=False)
    if state == "prefilling":
        while not 0 < request.num_computed_tokens < 200:
            world.step()
    elif state == "decoding":
        while len(request.output_ids) < 5:
            world.step()
    elif state == "preempted":
        while request.status is not RequestStatus.PREEMPTED:
            world.step()
    assert world.scheduler.abort(request.request_id) is request
    assert world.scheduler.abort(request.request_id) is None
    assert (request.status, request.finish_reason) == (RequestStatus.FINISHED, FinishReason.ABORT)
    assert request.finished_ns is not None
    assert not world.cache.holds(request)
    world.run(check=True)
    assert len(other.output_ids) == 300
    assert request not in world.finished
    assert world.cache.usage().used_bytes == world.cache.usage().cached_bytes == 0
    assert (world.counters.requests_aborted, world.counters.requests_completed) == (1, 1)


@pytest.mark.parametrize("before", [True, False])
def test_cancelled_inside_a_step(before: bool) -> None:
    world = World()
    stays, goes = world.add(ids(1, 30), max_tokens=5), world.add(ids(2, 30), max_tokens=5)
    plan = world.scheduler.schedule()
    assert len(plan.sequences) == 2
    if before:
        world.scheduler.abort(goes.request_id)
    outputs = world.run_plan(plan)
    world.scheduler.abort(goes.request_id)
    assert world.scheduler.update(plan, outputs) == []
    assert goes.output_ids == []
    assert len(stays.output_ids) == 1
    world.run(check=True)
    assert len(stays.output_ids) == 5


def test_an_id_can_be_used_again_while_the_old_ones_output_is_still_on_its_way() -> None:
    world = World()
    old = world.add(ids(1, 30), max_tokens=5)
    plan = world.scheduler.schedule()
    world.scheduler.abort(old.request_id)
    new = world.request(ids(2, 30), 5)
    new.request_id = old.request_id
    world.scheduler.add(new)
    world.scheduler.update(plan, [SequenceOutput(old, 1)])
    assert (old.output_ids, new.output_ids) == ([], [])
    world.run(check=True)
    assert len(new.output_ids) == 5


def test_a_failed_step_can_be_run_again() -> None:
    world = World(values={"kv_format": "int8"}, recode_tokens=64)
    request = world.add(ids(1, 200), max_tokens=10)
    world.step()
    for _ in range(3):
        plan = world.scheduler.schedule()
        assert plan.sequences
        world.scheduler.cancel(plan)
        world.check()
    world.run(check=True)
    assert len(request.output_ids) == 10


def test_a_sequence_without_its_token_counts_as_not_run() -> None:
    world = World()
    request = world.add(ids(1, 30), max_tokens=3)
    world.scheduler.update(world.scheduler.schedule(), [])
    assert request.num_computed_tokens == 0
    world.run(check=True)
    assert len(request.output_ids) == 3


# -- counting --------------------------------------------------------------------------------------------------------


def test_prefix_hits_are_counted_once_at_admission() -> None:
    """Case I.32: ten failed attempts count nothing; the eleventh counts once."""
    world = World(num_slabs=5, recode_tokens=0)
    world.add(ids(1, 160), max_tokens=1)
    world.run()
    blockers = [world.add(ids(i, 500), max_tokens=30) for i in (5, 6)]
    world.step()
    world.step()
    assert len(world.scheduler.running) == 2
    before = (world.counters.prefix_cache_queries, world.counters.prefix_cache_hits)
    request = world.add(ids(1, 160) + ids(2, 40), max_tokens=2)
    attempts = 0
    while request.status is RequestStatus.WAITING:
        world.scheduler._queues.blocked_at = None  # try in every step
        world.step()
        attempts += 1
        if request.status is RequestStatus.WAITING:
            assert (world.counters.prefix_cache_queries, world.counters.prefix_cache_hits) == before
    assert attempts > 10
    assert world.counters.prefix_cache_queries == before[0] + 200
    assert world.counters.prefix_cache_hits == before[1] + request.num_cached_tokens
    world.run(check=True)
    assert blockers[0].finish_reason is FinishReason.LENGTH


def test_times_come_from_the_clock() -> None:
    world = World()
    request = world.add(ids(1, 30), max_tokens=3)
    arrival = request.arrival_ns
    world.clock.advance_s(0.5)
    world.step()
    assert request.first_scheduled_ns == arrival + 500_000_000
    assert request.first_token_ns == request.first_scheduled_ns
    world.clock.advance_s(0.25)
    world.step()
    world.step()
    assert request.last_token_ns == request.finished_ns == arrival + 770_000_000


def test_bad_settings_change_nothing() -> None:
    world = World()
    for name, value in (("max_num_seqs", 3), ("max_num_batched_tokens", 100), ("kv_format", "fp8")):
        with pytest.raises(ValueError, match=name):
            world.scheduler.apply({**world.values, name: value})
    world.add(ids(1, 700), max_tokens=2)
    assert world.step().num_tokens == 512
    assert world.counters.tunable_changes == 0
    world.apply(max_num_seqs=8, kv_format="int8")
    assert world.counters.tunable_changes == 2


def test_an_idle_scheduler_plans_nothing() -> None:
    world = World()
    plan = world.scheduler.schedule()
    assert plan == StepPlan()
    assert world.scheduler.update(plan, []) == []
    assert world.counters.steps == 0
    assert not world.scheduler.has_work
