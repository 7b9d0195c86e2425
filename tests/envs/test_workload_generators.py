"""Generators: seeded, with the statistics they claim; scaling says by how much."""

from __future__ import annotations

import numpy as np
import pytest

from envs.workload.arrivals import Envelope, TwoStates, arrivals
from envs.workload.catalogue import CATALOGUE
from envs.workload.generators import Workload, generate
from envs.workload.lengths import Lengths
from envs.workload.scaling import Scaling, cap_context, scale
from envs.workload.sessions import Sessions
from envs.workload.trace import Trace, TraceError, TraceRequest


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_same_seed_gives_the_same_trace(name: str) -> None:
    once, again, other = (generate(CATALOGUE[name], duration_s=120, seed=seed) for seed in (1, 1, 2))
    assert once == again
    assert once.requests != other.requests
    times = [request.arrival_s for request in once.requests]
    assert times == sorted(times)
    assert times[0] == 0.0
    assert times[-1] <= 120
    assert CATALOGUE[name].fitted_to in once.notes[0]


@pytest.mark.parametrize("cv", [0.3, 1.0, 3.0])
def test_gamma_gaps_have_their_rate_and_variation(cv: float) -> None:
    times = arrivals(Envelope.constant(50.0, 400.0), cv, np.random.default_rng(7))
    gaps = np.diff(times)
    assert len(times) == pytest.approx(20_000, rel=0.08)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.08)


def test_arrivals_follow_the_envelope_and_skip_silence() -> None:
    times = arrivals(Envelope.phases((10, 100), (10, 0), (10, 300)), 1.0, np.random.default_rng(0))
    assert ((times >= 10) & (times < 20)).sum() == 0
    assert (times < 10).sum() == pytest.approx(1000, rel=0.15)
    assert (times >= 20).sum() == pytest.approx(3000, rel=0.1)
    assert times.max() <= 30


def test_two_states_have_the_dispersion_of_their_formula() -> None:
    process = TwoStates(low_rps=2.0, high_rps=20.0, low_mean_s=3.0, high_mean_s=2.0)
    rng = np.random.default_rng(11)
    times = arrivals(process.draw(40_000.0, rng), 1.0, rng)
    assert len(times) / 40_000 == pytest.approx(process.mean_rps, rel=0.05)
    for window in (1, 20):
        counts = np.bincount((times // window).astype(int))[: 40_000 // window]
        assert counts.var() / counts.mean() == pytest.approx(process.dispersion(window), rel=0.12)


def test_lengths_are_lognormal_within_bounds() -> None:
    drawn = np.array(Lengths(100, 0.5, 20, 400).draw(20_000, np.random.default_rng(0)))
    assert np.median(drawn) == pytest.approx(100, rel=0.03)
    assert (drawn.min(), drawn.max()) == (20, 400)
    assert np.log(drawn).std() == pytest.approx(0.5, rel=0.05)


def test_sessions_resend_their_context() -> None:
    sessions = Sessions(again=0.8, growth=Lengths(40, 0.1), block_tokens=16, open_sessions=4)
    workload = Workload("w", "", "nothing", Envelope.constant(10, 60), 1.0, Lengths(64, 0.1), Lengths(8, 0.1), sessions)
    trace = generate(workload, duration_s=60, seed=0)
    grown = 0
    for earlier, later in ((a, b) for i, a in enumerate(trace.requests) for b in trace.requests[i + 1 :]):
        if later.hash_ids[0] == earlier.hash_ids[0]:
            whole = earlier.prompt_tokens // 16
            assert later.hash_ids[:whole] == earlier.hash_ids[:whole]
            assert later.prompt_tokens > earlier.prompt_tokens
            grown += 1
    assert grown > len(trace.requests)
    for request in trace.requests:
        assert len(request.hash_ids) == -(-request.prompt_tokens // 16)


def test_nothing_arriving_is_an_error() -> None:
    with pytest.raises(TraceError, match="nothing arrives"):
        generate(CATALOGUE["chat-steady"], duration_s=0.001, seed=0)


def trace_of(*requests: TraceRequest, block: float = 0.0) -> Trace:
    return Trace("t", requests, block)


def test_scaling_divides_stretches_cuts_and_says_so() -> None:
    trace = trace_of(*(TraceRequest(float(i), 80 * (i + 1), 8 * (i + 1), (i,)) for i in range(10)), block=512)
    scaled = scale(
        trace, Scaling(length_scale=8, time_scale=2, max_prompt_tokens=45, max_output_tokens=3, duration_s=10)
    )
    assert [r.arrival_s for r in scaled.requests] == [0, 2, 4, 6, 8]
    assert [r.prompt_tokens for r in scaled.requests] == [10, 20, 30, 40, 45]
    assert [r.output_tokens for r in scaled.requests] == [1, 2, 3, 3, 3]
    assert scaled.block_tokens == 64
    assert scaled.notes == (
        "arrival times multiplied by 2",
        "cut at 10 s: 5 of 10 requests",
        "prompt and output lengths divided by 8",
        "1 prompts cut to 45 tokens",
        "2 outputs cut to 3 tokens",
    )


def test_thinning_keeps_its_share() -> None:
    trace = trace_of(*(TraceRequest(float(i), 1, 1) for i in range(4000)))
    assert len(scale(trace, Scaling(keep=0.25, seed=1)).requests) == pytest.approx(1000, rel=0.1)
    assert scale(trace, Scaling(keep=0.25, seed=1)) == scale(trace, Scaling(keep=0.25, seed=1))


@pytest.mark.parametrize(
    "bad", [{"length_scale": 0}, {"time_scale": -1}, {"keep": 0}, {"keep": 1.5}, {"duration_s": 0}]
)
def test_scaling_refuses_nonsense(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Scaling(**bad)  # type: ignore[arg-type]


def test_scaling_away_everything_is_an_error() -> None:
    with pytest.raises(TraceError, match="no request is left"):
        scale(trace_of(TraceRequest(0.0, 1, 1)), Scaling(keep=1e-9))


def test_requests_are_cut_to_the_context() -> None:
    trace = cap_context(trace_of(TraceRequest(0, 10, 5), TraceRequest(1, 200, 20), TraceRequest(2, 10, 90)), 100)
    assert [(r.prompt_tokens, r.output_tokens) for r in trace.requests] == [(10, 5), (80, 20), (10, 50)]
    assert trace.notes == ("2 of 3 requests cut to the server's context of 100 tokens",)
