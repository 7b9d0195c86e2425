"""Whether a restart is advised: by memory pressure alone, at its price, inside the quality budget, or not at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.tunables import CostClass, Tunable
from envs.port import Change
from policies.restart_advice import Settings, Storage, Terms, advise
from policies.restart_looks import Look, evidence_of

VALUES = ("f16", "q8_0", "q4_0")
STORAGE = {"f16": Storage(16, "native"), "q8_0": Storage(8.5, "int8"), "q4_0": Storage(4.5, "int4")}
KNOB = Tunable("kv", VALUES, "f16", "", CostClass.RESTART, "Storage.")
SLOTS = Tunable("slots", tuple(range(1, 65)), 1, "", CostClass.RESTART, "Requests at once.")


def settings(value: str = "f16") -> Settings:
    return Settings({"kv": KNOB}, {"kv": value}, STORAGE, ("kv",))


def pressed(seconds: int = 60, waiting: float = 5.0, preemptions: float | None = 1.0) -> list[Look]:
    """Full memory: ten run, some wait, tails are late."""
    one = Look(1.0, 10.0, waiting, 1.0, None, preemptions, is_over=True, rps=2.0)
    return [one] * seconds


def test_short_memory_is_worth_a_restart() -> None:
    advice = advise(pressed(), settings(), Terms(restart_s=30))
    assert (advice.scenario, advice.changes) == ("memory-short", (Change("kv", "q8_0"),))
    assert advice.saving is not None
    assert (advice.saving.preemptions, advice.saving.over_s, advice.saving.pressed_s) == (60, 60, 60)
    assert advice.cost is not None
    assert (advice.cost.seconds, advice.cost.requests, advice.cost.is_measured) == (30, 60, False)
    assert advice.payback_s == 30
    assert advice.is_worth
    assert any("a restart takes 30 s" in text for text in advice.assumed)
    assert "1.88 times as much" in advice.reason


def test_a_restart_that_costs_more_than_it_saves_is_not_worth_it() -> None:
    looks = [*pressed(10), *[Look(1.0, 1.0, 0.0, 0.1, None, 0.0, is_over=False, rps=2.0)] * 90]
    advice = advise(looks, settings(), Terms(restart_s=600, payback_s=3600))
    assert advice.changes
    assert advice.payback_s == pytest.approx(6000)
    assert not advice.is_worth
    assert advise(looks, settings(), Terms(restart_s=60, is_restart_measured=True)).is_worth


def test_late_without_short_memory_is_no_reason() -> None:
    late = [Look(1.0, 10.0, 5.0, 0.4, None, 0.0, is_over=True, rps=2.0)] * 60
    advice = advise(late, settings(), Terms())
    assert (advice.scenario, advice.changes) == ("not-memory", ())
    assert "would not help" in advice.reason
    calm = [Look(1.0, 1.0, 0.0, 0.2, None, 0.0, is_over=False)] * 60
    assert advise(calm, settings(), Terms()).scenario == "steady"


def test_what_would_not_have_fitted_either_is_not_counted_as_saved() -> None:
    advice = advise(pressed(waiting=30.0), settings(), Terms())
    assert advice.saving is not None
    assert (advice.saving.over_s, advice.saving.preemptions) == (0, 0)
    assert advice.payback_s is None
    assert not advice.is_worth


def test_a_lossier_format_is_taken_only_where_a_milder_one_does_not_do_and_the_budget_bears_it() -> None:
    looks = pressed(waiting=12.0)  # demand 2.2: more than 1.88 times, less than 3.56
    assert advise(looks, settings(), Terms()).changes == (Change("kv", "q8_0"),)
    assert advise(looks, settings(), Terms(quality_budget=None)).changes == (Change("kv", "q4_0"),)
    assert advise(pressed(), settings(), Terms(quality_budget=None)).changes == (Change("kv", "q8_0"),)
    none_left = advise(pressed(), settings("q8_0"), Terms())
    assert (none_left.scenario, none_left.changes) == ("no-format-left", ())


def test_where_memory_is_set_aside_by_request_the_number_grows_with_the_format() -> None:
    by_slot = Settings({"kv": KNOB, "slots": SLOTS}, {"kv": "f16", "slots": 8}, STORAGE, ("kv",), "slots")
    looks = [Look(1.0, 8.0, 4.0, None, 8.0, None, None, None)] * 60
    advice = advise(looks, by_slot, Terms())
    assert advice.changes == (Change("kv", "q8_0"), Change("slots", 15))
    assert advice.saving is not None
    assert (advice.saving.over_s, advice.saving.preemptions, advice.saving.pressed_s) == (None, None, 60)
    assert any("counts as time over target" in text for text in advice.assumed)
    one = Settings({"kv": KNOB, "slots": SLOTS}, {"kv": "f16", "slots": 1}, STORAGE, ("kv",), "slots")
    assert advise(looks, one, Terms()).scenario == "no-format-left", "half a slot more is none"


def test_what_cannot_be_told_is_not_guessed() -> None:
    assert advise([Look(1.0)] * 60, settings(), Terms()).scenario == "unknown-memory"
    unknown = Settings({"kv": KNOB}, {}, STORAGE, ("kv",))
    assert advise(pressed(), unknown, Terms()).scenario == "unknown-settings"
    assert advise(pressed(5), settings(), Terms()).scenario == "watching"
    assert advise([], settings(), Terms()).scenario == "watching"


def test_evidence_keeps_unknown_apart_from_none() -> None:
    seen = evidence_of([Look(1.0, 1.0, 0.0, 0.5)] * 3)
    assert (seen.over_s, seen.preemptions, seen.rps) == (None, None, None)
    assert (seen.watched_s, seen.peak_share, seen.peak_demand) == (3.0, 0.5, 0.5)


figures = st.one_of(st.none(), st.floats(0, 1e6))


@given(
    st.lists(
        st.builds(
            Look,
            seconds=st.floats(0.01, 100),
            running=figures,
            waiting=figures,
            usage=st.one_of(st.none(), st.floats(0, 1)),
            slots=figures,
            preemptions=figures,
            is_over=st.one_of(st.none(), st.booleans()),
            rps=figures,
        ),
        max_size=30,
    ),
    st.sampled_from(VALUES),
)
def test_savings_are_never_more_than_what_was_seen(looks: list[Look], value: str) -> None:
    advice = advise(looks, settings(value), Terms(least_s=1, quality_budget=None))
    assert advice.to_json()["reason"]
    if advice.saving is None:
        assert not advice.changes
        assert not advice.is_worth
        return
    seen = advice.evidence
    assert advice.saving.pressed_s <= seen.pressed_s + 1e-6
    if advice.saving.over_s is not None and seen.over_s is not None:
        assert advice.saving.over_s <= seen.over_s + 1e-6
    if advice.saving.preemptions is not None and seen.preemptions is not None:
        assert advice.saving.preemptions <= seen.preemptions * (1 + 1e-9) + 1e-6
    assert advice.changes[0].value != value
