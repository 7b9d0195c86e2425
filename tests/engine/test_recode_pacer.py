"""Recoding takes its share of a step, whatever a step and a token cost."""

from __future__ import annotations

import pytest

from engine.recode_pacer import RecodePacer


@pytest.mark.parametrize("step_ns", [4_000_000, 25_000_000, 300_000_000])
@pytest.mark.parametrize("token_ns", [500, 5_000])
def test_settles_at_its_share_of_the_step(step_ns: int, token_ns: int) -> None:
    pacer = RecodePacer(0.2)
    for _ in range(5):
        tokens = pacer.budget_tokens()
        pacer.observe(step_ns, tokens * token_ns, tokens)
    expected = min(16384, 0.2 * step_ns / token_ns)
    assert pacer.budget_tokens() == pytest.approx(expected, rel=0.01)


def test_starts_small_and_never_stops() -> None:
    pacer = RecodePacer(0.2, least_tokens=32)
    assert pacer.budget_tokens() == 32
    pacer.observe(1_000_000, 0, 0)
    assert pacer.budget_tokens() == 32, "no cost known yet"
    pacer.observe(1_000_000, 10_000_000, 32)
    assert pacer.budget_tokens() == 32, "too dear, but a conversion must end"


def test_decodes_after_slow_prefills_do_not_wait_for_what_these_could_afford() -> None:
    pacer = RecodePacer(0.2)
    for _ in range(50):
        pacer.observe(100_000_000, 1_000_000, 200)
    assert pacer.budget_tokens() == 4000
    pacer.observe(5_000_000, 1_000_000, 200)
    assert pacer.budget_tokens() == 200


def test_one_slow_step_among_fast_ones_moves_little() -> None:
    pacer = RecodePacer(0.2)
    for _ in range(50):
        pacer.observe(5_000_000, 1_000_000, 200)
    pacer.observe(500_000_000, 1_000_000, 200)
    pacer.observe(5_000_000, 1_000_000, 200)
    assert pacer.budget_tokens() == 200


def test_steps_of_no_time_teach_nothing() -> None:
    pacer = RecodePacer(0.2)
    pacer.observe(0, 0, 500)
    assert pacer.budget_tokens() == 64


@pytest.mark.parametrize("wrong", [{"share": 0.0}, {"share": 0.1, "least_tokens": 0}, {"share": 0.1, "most_tokens": 8}])
def test_refuses_senseless_bounds(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="share"):
        RecodePacer(**wrong)  # type: ignore[arg-type]
