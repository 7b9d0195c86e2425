"""Streams: the same as the whole trace, flat in memory, and with the rates and shapes that they claim."""

from __future__ import annotations

import tracemalloc
from itertools import islice, pairwise

import numpy as np
import pytest

from envs.workload.arrivals import Envelope, arrivals
from envs.workload.catalogue import CATALOGUE, WEEK
from envs.workload.generators import Workload, generate, stream
from envs.workload.lengths import Lengths, Percentiles
from envs.workload.sessions import Conversations
from envs.workload.statistics import summarise


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_stream_is_the_trace_that_generate_makes(name: str) -> None:
    workload = CATALOGUE[name]
    streamed = list(stream(workload, duration_s=400, seed=5))
    trace = generate(workload, duration_s=400, seed=5)
    start = streamed[0].arrival_s
    assert [request.arrival_s - start for request in streamed] == [request.arrival_s for request in trace.requests]
    assert [request.hash_ids for request in streamed] == [request.hash_ids for request in trace.requests]
    assert start >= 0
    assert streamed[-1].arrival_s < 400
    assert workload.stresses, "the catalogue says what each workload is hard for"


@pytest.mark.parametrize("name", ["chat-week", "chat-turns"])
def test_memory_does_not_grow_with_the_number_of_requests(name: str) -> None:
    requests = stream(CATALOGUE[name], duration_s=604_800, seed=0)
    tracemalloc.start()
    next(islice(requests, 18_000, None))  # two batches of arrivals, and as many open sessions as there will be
    early = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    next(islice(requests, 24_000, None))
    late = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert late < 1.25 * early


def test_a_very_bursty_process_has_its_rate_from_the_start() -> None:
    # Gaps of CV 13: a process that began with an arrival would bring 84 too many, here 84 % of what is expected.
    counts = [len(arrivals(Envelope.constant(1.0, 100.0), 13.0, np.random.default_rng(seed))) for seed in range(4000)]
    assert np.mean(counts) == pytest.approx(100, rel=0.1)


def test_gaps_of_the_burstiest_source_have_their_variation() -> None:
    times = arrivals(Envelope.constant(50.0, 20_000.0), 13.0, np.random.default_rng(1))
    gaps = np.diff(times)
    assert len(times) == pytest.approx(1_000_000, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(13, rel=0.05)


def test_pieces_of_an_envelope_have_their_own_variation() -> None:
    envelope = Envelope((0.0, 1000.0, 2000.0), (40.0, 40.0), gap_cvs=(0.5, 4.0))
    times = arrivals(envelope, 1.0, np.random.default_rng(2))
    for start, cv in ((0, 0.5), (1000, 4.0)):
        gaps = np.diff(times[(times >= start) & (times < start + 1000)])
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1)
    assert (np.diff(times) >= 0).all()


def test_a_flash_crowd_rises_holds_and_decays() -> None:
    envelope = Envelope.flash_crowd(10, 100, calm_s=50, rise_s=10, hold_s=20, decay_s=30, steps=10)
    assert envelope.duration_s == pytest.approx(50 + 10 + 20 + 4 * 30)
    rates = envelope.rates_rps
    assert rates[0] == 10
    assert list(rates[1:11]) == sorted(rates[1:11])
    assert rates[11] == max(rates) == 100
    assert list(rates[12:]) == sorted(rates[12:], reverse=True)
    # Arrivals above the calm rate: half the rise, the hold, and a decay of area (peak - base) * 30 * (1 - e^-4).
    above = (envelope.mean_rps - 10) * envelope.duration_s
    assert above == pytest.approx(90 * (5 + 20 + 30 * (1 - np.exp(-4))))


def test_a_week_repeats_and_follows_its_shape() -> None:
    envelope = Envelope.phases(*WEEK)
    assert envelope.duration_s == 7 * 86_400
    assert envelope.mean_rps == pytest.approx(45.0, rel=0.01)
    twice = envelope.covering(14 * 86_400.0)
    assert twice.rates_rps == envelope.rates_rps * 2


def test_a_regime_shift_changes_kind_at_its_time() -> None:
    workload = CATALOGUE["regime-shift"]
    requests = list(stream(workload, duration_s=1200, seed=4))
    times = [request.arrival_s for request in requests]
    assert times == sorted(times)
    medians = [
        np.median([r.output_tokens for r in requests if start <= r.arrival_s < end])
        for start, end in ((0, 300), (300, 600), (600, 1200))
    ]
    for regime, median in zip(workload.regimes, medians, strict=True):
        assert median == pytest.approx(regime.output.median, rel=0.2)
    assert [r for r in requests if r.arrival_s < 300] == list(stream(workload, duration_s=300, seed=4))


def test_regimes_share_no_blocks() -> None:
    chat = CATALOGUE["chat-turns"]
    both = Workload("both", "", "", chat.rate, 1.0, chat.prompt, chat.output, chat.sessions, "", (chat,), 60.0)
    requests = list(stream(both, duration_s=120, seed=0))
    first, second = (
        {block for r in requests if (r.arrival_s < 60) == early for block in r.hash_ids} for early in (True, False)
    )
    assert first
    assert second
    assert not first & second


TURNS = Conversations(
    mean_turns=4.0,
    think_s=Lengths(20, 0.5, 1, 600),
    question=Lengths(30, 0.5, 4),
    block_tokens=16,
    token_s=0.1,
    system_prompts=2,
    system_tokens=64,
    context_tokens=1_000_000,
)


def conversations(duration_s: float = 2000.0, seed: int = 0) -> list[tuple[float, int, int, tuple[int, ...]]]:
    output = Lengths(50, 0.5, 1)
    workload = Workload("c", "", "", Envelope.constant(5.0, 60.0), 1.0, Lengths(40, 0.5, 4), output, TURNS)
    requests = stream(workload, duration_s=duration_s, seed=seed)
    return [(r.arrival_s, r.prompt_tokens, r.output_tokens, r.hash_ids) for r in requests]


def test_conversations_have_their_rate_from_the_first_minute() -> None:
    turns = conversations()
    times = np.array([turn[0] for turn in turns])
    assert (np.diff(times) >= 0).all()
    for start, end in ((0, 500), (500, 2000)):
        rate = ((times >= start) & (times < end)).sum() / (end - start)
        assert rate == pytest.approx(5.0, rel=0.1)


def test_a_turn_resends_question_and_answer_and_comes_after_both() -> None:
    # The block behind the system prompt is a session's own: it tells sessions apart.
    sessions: dict[int, list[tuple[float, int, int, tuple[int, ...]]]] = {}
    for turn in conversations():
        if turn[1] >= 80:
            sessions.setdefault(turn[3][4], []).append(turn)
    followed = 0
    for turns in sessions.values():
        for (at, prompt, output, ids), (later, longer, _, more) in pairwise(turns):
            assert longer >= prompt + output + 4
            assert later >= at + 0.1 * output + 1
            whole = prompt // 16
            assert more[:whole] == ids[:whole]
            followed += 1
    assert followed > 3000


def test_a_conversation_never_outgrows_its_context() -> None:
    requests = list(stream(CATALOGUE["chat-turns"], duration_s=3600, seed=1))
    assert max(request.prompt_tokens for request in requests) <= 32_000


def test_percentiles_are_met_and_a_fit_is_near() -> None:
    published = {50.0: 1020.0, 90.0: 2734.0, 99.0: 4142.0}
    exact = Percentiles(tuple(published.items()))
    drawn = exact.draw(100_000, np.random.default_rng(0))
    for share, value in published.items():
        assert np.percentile(drawn, share) == pytest.approx(value, rel=0.03)
    assert exact.mean == pytest.approx(np.mean(drawn), rel=0.02)
    assert exact.median == pytest.approx(1020)
    fitted = Lengths.fit({50: 100.0, 84.134_47: 200.0})  # one standard deviation up
    assert (fitted.median, fitted.sigma) == (pytest.approx(100), pytest.approx(np.log(2)))
    near = Lengths.fit(published)
    assert near.median == pytest.approx(1020, rel=0.1)


@pytest.mark.parametrize("points", [((50, 10),), ((50, 10), (50, 20)), ((50, 10), (90, 5)), ((0, 1), (50, 2))])
def test_percentiles_that_contradict_each_other_are_refused(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ValueError, match="percentiles"):
        Percentiles(points)


def test_a_workload_of_the_catalogue_has_the_statistics_of_its_source() -> None:
    code = summarise(generate(CATALOGUE["code-gamma13"], duration_s=100_000, seed=1))
    assert code.gap_cv == pytest.approx(13, rel=0.1)
    assert code.mean_rps == pytest.approx(2.6, rel=0.15)
    assert (code.prompt["p50"], code.output["p99"]) == (pytest.approx(1469, rel=0.05), pytest.approx(251, rel=0.05))
    mooncake = summarise(generate(CATALOGUE["chat-shared-prefix"], duration_s=2100, seed=1))
    assert mooncake.hit_ratio == pytest.approx(0.35, abs=0.05)
