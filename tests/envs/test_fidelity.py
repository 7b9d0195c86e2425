"""How live runs and simulations are compared."""

from __future__ import annotations

import pytest

from envs.fidelity import FIGURES, compare, kendall_tau


def run(value: float) -> dict[str, float]:
    return dict.fromkeys(FIGURES, value)


def test_error_is_against_the_median_run_and_spread_of_all_pairs() -> None:
    found = compare([run(1.0), run(1.5), run(1.25)], run(1.275))
    assert found.error_pct["tpot"] == pytest.approx(2.0)
    assert found.spread_pct["e2e"] == pytest.approx(100 * (0.5 + 0.25 + 0.25) / 3 / 1.25)
    assert (found.live["tpot"], found.simulated["tpot"]) == (1.25, 1.275)


def test_one_odd_run_does_not_decide() -> None:
    assert compare([run(1.0), run(1.0), run(3.0)], run(1.01)).error_pct["ttft_p90"] == pytest.approx(1.0)


def test_errors_count_either_way() -> None:
    assert compare([run(1.0)], run(0.9)).error_pct["e2e"] == pytest.approx(10.0)


def test_ranks_count_only_pairs_that_differ_by_more_than_the_spread() -> None:
    assert kendall_tau([1.0, 1.01, 2.0], [5.0, 4.0, 6.0], [0.05] * 3) == (1.0, 2)
    assert kendall_tau([1.0, 1.01], [1.0, 2.0], [0.05] * 2) == (None, 0)
    assert kendall_tau([1.0, 2.0], [2.0, 1.0], [0.05] * 2) == (-1.0, 1)
    # One that scatters tells nothing of itself, and the others still count.
    assert kendall_tau([1.0, 1.2, 2.0], [1.0, 3.0, 2.0], [0.05, 0.9, 0.05]) == (1.0, 1)
