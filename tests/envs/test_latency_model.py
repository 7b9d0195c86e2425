"""The latency model: exact arithmetic, named terms, and a fit that finds what it was made from."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.step_counts import ALL_TERMS, RECODE_INDEX, RECODE_NAMES, STEP_INDEX, STEP_NAMES
from envs.latency_fit import fit_recodes, fit_steps
from envs.latency_model import LatencyModel
from envs.nnls import nnls

TRUE = {
    "step": 2e-3,
    "prefill_token": 8e-6,
    "decode_sequence": 5e-5,
    "token_beyond_knee": 1e-5,
    "prefill_pair": 2e-9,
    "decode_kv_native": 3e-8,
    "decode_kv_int4": 9e-9,
    "decode_block": 2e-7,
}


def samples(rng: np.random.Generator, number: int, knee: int) -> np.ndarray:
    counts = np.zeros((number, len(STEP_NAMES)), np.int64)
    counts[:, STEP_INDEX["step"]] = 1
    for name, most in (
        ("prefill_token", 512), ("decode_sequence", 64), ("prefill_sequence", 4), ("prefill_pair", 10**6),
        ("prefill_kv_native", 4096), ("decode_kv_native", 10**5), ("decode_kv_int4", 10**5), ("decode_block", 10**4),
        ("sample", 64),
    ):  # fmt: skip
        counts[:, STEP_INDEX[name]] = rng.integers(0, most, number)
    tokens = counts[:, STEP_INDEX["prefill_token"]] + counts[:, STEP_INDEX["decode_sequence"]]
    counts[:, STEP_INDEX["token_beyond_knee"]] = np.maximum(tokens - knee, 0)
    return counts


def test_terms_have_names_units_and_meanings_of_their_own() -> None:
    assert len({term.name for term in ALL_TERMS}) == len(ALL_TERMS)
    assert all(term.unit and term.description for term in ALL_TERMS)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_many_steps_at_once_cost_exactly_what_each_costs_alone(seed: int) -> None:
    rng = np.random.default_rng(seed)
    model = LatencyModel({name: float(rng.random() * 10.0 ** rng.integers(-9, -5)) for name in STEP_NAMES})
    counts = samples(rng, 50, knee=8)
    assert model.steps_ns(counts).tolist() == [model.step_ns(row.tolist()) for row in counts]


def test_a_step_costs_the_sum_of_its_parts() -> None:
    model = LatencyModel({"step": 1e-3, "decode_sequence": 2e-6, "decode_kv_native": 1.5e-9})
    counts = [0] * len(STEP_NAMES)
    counts[STEP_INDEX["step"]], counts[STEP_INDEX["decode_sequence"]] = 1, 4
    counts[STEP_INDEX["decode_kv_native"]] = 1001
    assert model.step_ns(counts) == 1_000_000 + 8_000 + 1501  # 1501.5 ns, cut to whole nanoseconds


def test_fit_finds_the_model_behind_clean_samples() -> None:
    rng = np.random.default_rng(1)
    counts = samples(rng, 300, knee=64)
    times = np.array([TRUE.get(name, 0.0) for name in STEP_NAMES]) @ counts.T
    fit = fit_steps(counts, times)
    assert fit.knee_tokens == 64
    for name, value in TRUE.items():
        assert fit.seconds[name] == pytest.approx(value, rel=1e-6), name
    assert fit.error.p90 < 1e-6


def test_fit_states_the_error_of_noisy_samples() -> None:
    rng = np.random.default_rng(2)
    counts = samples(rng, 400, knee=8)
    noise = rng.normal(1.0, 0.05, len(counts))
    times = (np.array([TRUE.get(name, 0.0) for name in STEP_NAMES]) @ counts.T) * noise
    error = fit_steps(counts, times).error
    assert 0.025 < error.median < 0.045  # the median of |normal(0, 0.05)| is 0.034
    assert 0.07 < error.p90 < 0.1


def test_recodes_are_fitted_by_pair() -> None:
    rng = np.random.default_rng(3)
    counts = np.zeros((40, len(RECODE_NAMES)), np.int64)
    counts[:, RECODE_INDEX["recode"]] = rng.integers(1, 3, 40)
    counts[:20, RECODE_INDEX["recode_native_int4"]] = rng.integers(16, 4096, 20)
    counts[20:, RECODE_INDEX["recode_int8_int4"]] = rng.integers(16, 4096, 20)
    times = counts @ np.array([{"recode": 1e-5, "recode_native_int4": 4e-8}.get(name, 2e-8) for name in RECODE_NAMES])
    seconds = fit_recodes(counts, times).seconds
    assert seconds["recode_native_int4"] == pytest.approx(4e-8)
    assert seconds["recode_int8_int4"] == pytest.approx(2e-8)
    assert seconds["recode"] == pytest.approx(1e-5)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_nnls_meets_the_optimality_conditions(seed: int) -> None:
    """Kuhn-Tucker: no term is negative, used ones have no slope, unused ones would only make it worse."""
    rng = np.random.default_rng(seed)
    matrix = rng.normal(size=(30, 8)) * 10.0 ** rng.integers(-3, 4, 8)
    target = rng.normal(size=30)
    solution = nnls(matrix, target)
    slope = matrix.T @ (matrix @ solution - target) / np.linalg.norm(matrix, axis=0)
    assert (solution >= 0).all()
    assert (np.abs(slope[solution > 0]) < 1e-7).all()
    assert (slope > -1e-7).all()


def test_nnls_agrees_with_scipy() -> None:
    optimize = pytest.importorskip("scipy.optimize")
    rng = np.random.default_rng(5)
    for _ in range(50):
        matrix, target = rng.normal(size=(40, 12)), rng.normal(size=40)
        assert nnls(matrix, target) == pytest.approx(optimize.nnls(matrix, target)[0], abs=1e-9)


def test_nnls_of_linearly_dependent_terms_still_fits() -> None:
    matrix = np.array([[1.0, 1.0, 0.0], [2.0, 2.0, 0.0], [3.0, 3.0, 0.0]])
    solution = nnls(matrix, np.array([2.0, 4.0, 6.0]))
    assert matrix @ solution == pytest.approx([2.0, 4.0, 6.0])


@pytest.mark.parametrize("seconds", [{"nonsense": 1.0}, {"step": -1.0}, {"step": float("nan")}, {"step": float("inf")}])
def test_impossible_coefficients_are_refused(seconds: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="latency term"):
        LatencyModel(seconds)


def test_times_that_scatter_are_fitted_at_their_mean() -> None:
    """Not below it, as least squares relative to what was measured would be."""
    rng = np.random.default_rng(3)
    counts = np.zeros((4000, len(STEP_NAMES)), np.int64)
    counts[:, STEP_INDEX["step"]] = 1
    counts[:, STEP_INDEX["decode_sequence"]] = rng.integers(1, 64, len(counts))
    exact = 2e-3 + 1e-4 * counts[:, STEP_INDEX["decode_sequence"]]
    scatter = rng.lognormal(0.0, 0.3, len(counts))
    found = fit_steps(counts, exact * scatter / scatter.mean())
    predicted = LatencyModel(found.seconds, found.knee_tokens).steps_ns(counts) / 1e9
    assert predicted.sum() == pytest.approx(exact.sum(), rel=0.01)


def test_a_mean_of_many_steps_counts_as_often() -> None:
    """Of two kinds of step with one count, each measured once or a hundred times, the fit lies at the latter."""
    counts = np.zeros((2, len(STEP_NAMES)), np.int64)
    counts[:, STEP_INDEX["step"]] = 1
    times = np.array([1e-3, 2e-3])
    seconds = [fit_steps(counts, times, np.array(repeats)).seconds["step"] for repeats in ((100, 1), (1, 100))]
    assert 1e-3 < seconds[0] < 1.05e-3
    assert 1.95e-3 < seconds[1] < 2e-3
