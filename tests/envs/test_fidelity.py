"""How live runs and simulations are compared when the machine is not always equally fast."""

from __future__ import annotations

import pytest

from envs.fidelity import FIGURES, compare


def run(value: float) -> dict[str, float]:
    return dict.fromkeys(FIGURES, value)


def test_each_run_is_held_against_a_simulation_at_its_own_speed() -> None:
    # The machine becomes half as fast again; a simulator that is 2 % off is 2 % off, whatever the machine does.
    found = compare([run(1.0), run(1.5), run(1.25)], [run(1.02), run(1.53), run(1.275)], run(1.02), [1.0, 1.5, 1.25])
    assert found.error_pct["tpot"] == pytest.approx(2.0)
    assert found.uncorrected_pct["tpot"] == pytest.approx(100 * 0.23 / 1.25)
    assert found.spread_pct["e2e"] == pytest.approx(100 * (0.5 + 0.25 + 0.25) / 3 / 1.25)
    assert (found.live["tpot"], found.simulated["tpot"]) == (1.25, 1.275)


def test_one_odd_run_does_not_decide() -> None:
    found = compare([run(1.0), run(1.0), run(3.0)], [run(1.01)] * 3, run(1.01), [1.0] * 3)
    assert found.error_pct["ttft_p90"] == pytest.approx(1.0)


def test_errors_count_either_way() -> None:
    assert compare([run(1.0)], [run(0.9)], run(0.9), [1.0]).error_pct["e2e"] == pytest.approx(10.0)
