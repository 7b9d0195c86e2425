"""A format that the quality budget does not bear is clamped to the farthest on its way that it does."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.tunables import TUNABLES, default_values
from envs.features import FEATURES
from envs.port import Change
from envs.profile import Quality, read_profile
from envs.reward import Charge
from envs.simulated import DEFAULT_PROFILE
from envs.spaces import Observation
from policies.guard import Guard, GuardConfig, GuardContext, Verdict, VerdictCode, Writer
from policies.guards import guard_for
from policies.quality_budget import Losses, QualityBudget
from policies.quality_ladder import as_far_as_borne, rungs

FORMATS = TUNABLES["kv_format"].values
PUBLISHED = guard_for(None, 0.005)
MEASURED = guard_for(
    read_profile(DEFAULT_PROFILE).model_copy(update={"quality": Quality(by_format=dict.fromkeys(FORMATS, 0.0))}), 0.005
)


class Driver:
    """One proposal a second; ``takes``: whether the engine does what is let through."""

    def __init__(self, guard: Guard, kv_format: str = "native", *, takes: bool = True) -> None:
        self.guard, self.state, self.takes = guard, guard.initial_state(), takes
        self.knobs = {**default_values(), "kv_format": kv_format}
        self.writers: dict[str, Writer] = {}
        self.second = 100

    def observation(self) -> Observation:
        values: dict[str, float | None] = dict.fromkeys((f.name for f in FEATURES), None)
        values |= {"running": 5.0, "output_tokens_p95": 100.0, "decode_tps": 50.0}
        return Observation(self.second * 10**9, values, dict(self.knobs), observed_s=99.0, instance="a")

    def propose(self, value: str, *, tokens: float = 0.0, after_s: int = 1, knob: str = "kv_format") -> Verdict:
        self.second += after_s
        context = GuardContext(self.observation(), self.writers, charge=Charge(tokens, 0.0))
        verdict, self.state = self.guard.check(Change(knob, value), context, self.state)
        if verdict.change is not None and self.takes:
            self.knobs[verdict.change.knob] = verdict.change.value
        return verdict


def test_rungs_lead_from_where_the_knob_is_to_what_is_proposed() -> None:
    assert rungs(Change("kv_format", "int4"), "native") == ("int8", "k8v4", "int4")
    assert rungs(Change("kv_format", "int4"), "k8v4") == ("int4",)
    assert rungs(Change("kv_format", "native"), "k8v4") == ("int8", "native")
    assert rungs(Change("eviction", "heavy_hitter"), "none") == ("heavy_hitter",)


def test_by_published_figures_int4_ends_at_int8_and_by_measured_ones_at_int4() -> None:
    verdict = Driver(PUBLISHED).propose("int4")
    assert (verdict.code, verdict.change) == (VerdictCode.ALLOWED, Change("kv_format", "int8"))
    for words in ("kv_format native -> int8", "in place of int4", "2.70%", "(estimated, published)", "0.50%"):
        assert words in verdict.text
    measured = Driver(MEASURED).propose("int4")
    assert (measured.change, measured.text) == (Change("kv_format", "int4"), "kv_format native -> int4")


def test_where_the_knob_is_as_far_as_it_may_go_it_is_no_decision() -> None:
    driver = Driver(PUBLISHED)
    verdicts = [driver.propose("int4", after_s=10) for _ in range(50)]
    assert verdicts[0].allowed
    assert {verdict.code for verdict in verdicts[1:]} == {VerdictCode.NO_CHANGE}
    assert not verdicts[-1].is_decision
    assert "kv_format is int8 already" in verdicts[-1].text
    assert "2.70%" in verdicts[-1].text
    assert driver.propose("native").allowed  # and the way back is open


def test_ways_of_evicting_are_refused_as_before() -> None:
    for way in ("window", "heavy_hitter"):
        verdict = Driver(PUBLISHED).propose(way, knob="eviction")
        assert (verdict.code, verdict.change) == (VerdictCode.OVER_BUDGET, None)


def test_only_allowed_values_are_offered_instead() -> None:
    guard = Guard(GuardConfig(allowed={"kv_format": ("native", "int4")}), quality=PUBLISHED.quality)
    assert Driver(guard).propose("int4").code is VerdictCode.NO_CHANGE


def test_it_waits_for_its_turn_like_any_change() -> None:
    driver = Driver(PUBLISHED)
    assert driver.propose("int8").allowed
    assert driver.propose("native", after_s=10).allowed
    assert driver.propose("int4").code is VerdictCode.DWELL
    driver.writers["kv_format"] = Writer("operator:anna", 3)
    assert driver.propose("int4", after_s=10).code is VerdictCode.OVERRIDE


def test_what_the_budget_bears_by_turns_is_asked_of_an_engine_once() -> None:
    """Advise mode, or an engine that refuses: int8 today, k8v4 once that is saved for, is one wish and not two."""
    driver = Driver(PUBLISHED, takes=False)
    assert driver.propose("int4").change == Change("kv_format", "int8")
    saved = [driver.propose("int4", tokens=500.0, after_s=6) for _ in range(9)]
    assert {verdict.code for verdict in saved} == {VerdictCode.NOT_TAKEN}
    assert "kv_format=int8 was asked for" in saved[-1].text
    # Tried again after a minute, then as far as is paid for by now.
    assert driver.propose("int4", after_s=10).change == Change("kv_format", "k8v4")
    assert driver.propose("int4", after_s=10).code is VerdictCode.NOT_TAKEN


def test_a_milder_format_that_loses_more_leaves_the_knob_where_it_is() -> None:
    losses = Losses({"native": 0.0, "int8": 0.001, "k8v4": 0.012, "int4": 0.0}, {})
    driver = Driver(Guard(quality=QualityBudget(0.005, losses)), "int4")
    assert driver.propose("k8v4").code is VerdictCode.NO_CHANGE
    assert driver.propose("int8").allowed


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(0, 0.05), min_size=3, max_size=3),
    st.sampled_from(FORMATS),
    st.sampled_from(FORMATS),
    st.sets(st.sampled_from(FORMATS), min_size=1),
    st.floats(0, 1e6),
)
def test_the_change_instead_is_borne_on_the_way_and_the_farthest(
    lost: list[float], now: str, proposed: str, others: set[str], tokens: float
) -> None:
    budget = QualityBudget(0.005, Losses(dict(zip(FORMATS[1:], lost, strict=True)), {}))
    allowed, looked = {*others, proposed}, Driver(PUBLISHED, now).observation()
    state = budget.brought_to(looked, Charge(tokens, 0.0), {**budget.initial_state(), "stamp_ns": 0})
    wanted = Change("kv_format", proposed)
    given_instead, why = as_far_as_borne(budget, wanted, allowed, looked, state)
    assert (given_instead == wanted) is (not why or proposed == now)
    way = (now, *rungs(wanted, now)) if proposed != now else (now,)
    borne = [
        value for value in way
        if value == now or (value in allowed and budget.objection(Change("kv_format", value), looked, state) is None)
    ]  # fmt: skip
    assert given_instead.value == borne[-1]


@pytest.mark.parametrize("budget", [0.0, 0.005])
def test_native_is_always_borne(budget: float) -> None:
    driver = Driver(guard_for(None, budget), "int4")
    assert driver.propose("native").allowed
