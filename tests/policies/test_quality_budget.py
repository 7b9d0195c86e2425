"""The quality budget: whatever a policy proposes, what is charged per token stays inside it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.tunables import TunableValue, default_values
from envs.features import FEATURES
from envs.port import Change
from envs.profile import Quality, read_profile
from envs.reward import Charge
from envs.simulated import DEFAULT_PROFILE
from envs.spaces import Observation
from policies.guard import Guard, GuardConfig, GuardContext, Verdict, VerdictCode, Writer
from policies.guards import QUALITY_BUDGET, guard_for, losses_of, made, quality_status, what_holds
from policies.quality_budget import Losses, QualityBudget

BUDGET = 0.005
LOSSES = Losses({"native": 0.0, "int8": 0.001, "k8v4": 0.012, "int4": 0.027}, {"window": 0.2, "heavy_hitter": 0.05})
PROPOSALS = [
    Change(knob, value)
    for knob, values in {
        "kv_format": ("native", "int8", "k8v4", "int4"),
        "eviction": ("none", "window", "heavy_hitter"),
        "keep_tokens": (128, 2048),
    }.items()
    for value in values
]


@dataclass
class Request:
    """``loss``: per token; precision that is lost stays lost, so it never falls."""

    left: int
    loss: float = 0.0


@dataclass
class Service:
    """As many requests at once, ``tick_tokens`` each and tick, of at most ``longest`` tokens; the loss that settings
    come to is reached at the next tick and kept until a request ends. The worst case of what the guard allows for.
    """

    guard: Guard
    longest: int = 100
    tick_tokens: int = 10
    known: bool = True
    knobs: dict[str, TunableValue] = field(default_factory=default_values)
    writers: dict[str, Writer] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    tokens: float = 0.0
    loss: float = 0.0
    second: int = 100
    charge: Charge | None = None
    state: dict[str, object] = field(default_factory=dict)
    worst: float = 0.0

    def __post_init__(self) -> None:
        self.state = self.guard.initial_state()

    def setting_loss(self) -> float:
        stored = LOSSES.of_format(self.knobs["kv_format"]) or 0.0
        return max(stored, LOSSES.of_eviction(self.knobs["eviction"]) or 0.0)

    def observation(self) -> Observation:
        values: dict[str, float | None] = dict.fromkeys((f.name for f in FEATURES), None)
        values |= {"running": float(len(self.requests)), "decode_tps": float(len(self.requests) * self.tick_tokens)}
        if self.known:
            values |= {"output_tokens_p95": float(self.longest)}
        return Observation(self.second * 10**9, values, dict(self.knobs), observed_s=99.0, instance="a")

    def tick(self, proposal: Change | None, running: int = 10) -> Verdict:
        """A second of service, then the guard."""
        for request in self.requests:
            request.loss = max(request.loss, self.setting_loss())
            done = min(self.tick_tokens, request.left)
            request.left -= done
            self.tokens += done
            self.loss += done * request.loss
        spent = self.loss, self.tokens
        if self.charge is not None:
            total = self.tokens - self._before[1]
            self.charge = Charge(total, (self.loss - self._before[0]) / total if total else 0.0)
        else:
            self.charge = Charge()
        self._before = spent
        self.requests = [request for request in self.requests if request.left > 0]
        while len(self.requests) < running:
            self.requests.append(Request(self.longest))
        self.second += 1
        state = json.loads(json.dumps(self.state))  # it is journalled
        context = GuardContext(self.observation(), self.writers, charge=self.charge)
        verdict, self.state = self.guard.check(proposal, context, state)
        if verdict.change is not None:
            self.knobs[verdict.change.knob] = verdict.change.value
        if self.tokens > 0:
            self.worst = max(self.worst, self.loss - BUDGET * self.tokens)
        return verdict

    @property
    def mean(self) -> float:
        return self.loss / self.tokens if self.tokens else 0.0


def guard(budget: float = BUDGET, losses: Losses = LOSSES, **options: float) -> Guard:
    return Guard(GuardConfig(dwell_s={}, rates={}), quality=QualityBudget(budget, losses, **options))


SCRIPTS = st.lists(
    st.tuples(st.sampled_from([None, *PROPOSALS]), st.integers(1, 40), st.integers(0, 30)), min_size=1, max_size=20
)


@settings(max_examples=40, deadline=None)
@given(SCRIPTS, st.integers(1, 30), st.integers(5, 300))
def test_whatever_is_proposed_the_mean_loss_stays_inside_the_budget(
    script: list[tuple[Change | None, int, int]], running: int, longest: int
) -> None:
    service = Service(guard(), longest=longest)
    for proposal, seconds, _ in script:
        for _ in range(seconds):
            service.tick(proposal, running)
            assert service.loss <= BUDGET * service.tokens + 1e-9


@settings(max_examples=40, deadline=None)
@given(SCRIPTS, st.integers(5, 300))
def test_a_burst_overdraws_by_no_more_than_one_tick_brings(
    script: list[tuple[Change | None, int, int]], longest: int
) -> None:
    service, worst = Service(guard(), longest=longest), 0.0
    for proposal, seconds, running in script:
        for _ in range(seconds):
            # What comes at once under a lossy setting keeps its loss until it ends.
            arriving = max(0, running - len(service.requests))
            worst = max(worst, arriving * longest * max(0.0, service.setting_loss() - BUDGET))
            service.tick(proposal, running)
            assert service.loss <= BUDGET * service.tokens + worst + 1e-9


def test_savings_are_spent_and_the_knob_is_handed_back_in_time() -> None:
    service = Service(guard())
    verdicts = [service.tick(Change("kv_format", "k8v4")) for _ in range(1000)]
    codes = [verdict.code for verdict in verdicts]
    # At once as far as is free for ever, and the rest of the way once it is paid for.
    first, let_in = (number for number, code in enumerate(codes) if code is VerdictCode.ALLOWED)
    assert [verdicts[number].change for number in (first, let_in)] == [
        Change("kv_format", "int8"),
        Change("kv_format", "k8v4"),
    ]
    assert first == 0
    assert set(codes[1:let_in]) == {VerdictCode.NO_CHANGE}
    assert let_in > 10
    back = codes.index(VerdictCode.HANDED_BACK)
    assert back - let_in >= 15  # about the time for which it had to be affordable
    assert set(codes[let_in + 1 : back]) == {VerdictCode.NO_CHANGE}
    # A need that lasts is not met from savings a second time, and asking is no decision.
    assert set(codes[back + 1 :]) == {VerdictCode.NO_CHANGE}
    assert "wanted ever since" in verdicts[-1].text
    assert service.knobs["kv_format"] == "int8"
    assert service.mean <= BUDGET
    for _ in range(150):
        service.tick(None)
    assert service.tick(Change("kv_format", "k8v4")).allowed  # nobody had asked for it, and much is saved again


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(["k8v4", "int4"]), st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(5, 300))
def test_a_wish_that_lasts_moves_the_knob_up_the_ladder_and_at_most_once_back(
    wish: str, loads: list[int], longest: int
) -> None:
    """However the load sways: rules ask at every tick for what they do not get, and nothing comes and goes."""
    service = Service(guard(), longest=longest)
    moves = []
    for running in loads:
        for _ in range(100):
            verdict = service.tick(Change("kv_format", wish), running)
            if verdict.is_decision:
                assert verdict.change is not None
                moves.append(verdict.change.value)
    up = ["int8", "k8v4", "int4"]
    back = moves.index("int8", 1) if "int8" in moves[1:] else len(moves)
    assert moves[:back] == [value for value in up if value in moves[:back]]
    assert moves[back:] in ([], ["int8"])


def test_the_figures_are_in_the_text() -> None:
    service = Service(guard())
    service.tick(None)
    refused = service.tick(Change("eviction", "window"))
    assert refused.code is VerdictCode.OVER_BUDGET
    assert "20.00%" in refused.text
    assert "0.50%" in refused.text
    texts = [service.tick(Change("kv_format", "int4")) for _ in range(600)]
    for figure in ("2.70%", "0.50%", "in place of int4"):
        assert figure in texts[0].text
    handed = next(verdict for verdict in texts if verdict.code is VerdictCode.HANDED_BACK)
    assert handed.text.startswith("kv_format k8v4 -> int8: quality budget: 0.")
    assert "1.20%" in handed.text


def test_what_is_cheap_is_always_free_and_the_way_back_is_always_open() -> None:
    assert Service(guard()).tick(Change("kv_format", "int8")).allowed
    budget, service = QualityBudget(BUDGET, LOSSES), Service(guard())
    service.knobs |= {"kv_format": "int4", "eviction": "window", "keep_tokens": 512}
    looked, state = service.observation(), budget.initial_state()
    for change in (Change("keep_tokens", 2048), Change("kv_format", "k8v4"), Change("eviction", "heavy_hitter")):
        assert budget.objection(change, looked, state) is None
    assert budget.objection(Change("block_size", 64), looked, state) is None
    assert budget.objection(Change("keep_tokens", 128), looked, state) is not None


def test_eviction_that_drops_little_costs_little() -> None:
    """At most the share of the longest sequences that is beyond what is kept."""
    budget = QualityBudget(BUDGET, LOSSES)
    values: dict[str, float | None] = {"prompt_tokens_p95": 2000.0, "output_tokens_p95": 200.0, "running": 3.0}
    knobs = {**default_values(), "keep_tokens": 2048}
    looked = Observation(10**9, {**values, "decode_tps": 50.0}, knobs, observed_s=99.0, instance="a")
    state = budget.initial_state()
    # (2200 - 2064) / 2200 of 5 % is 0.31 %: not free, but inside, so nothing need be saved.
    assert budget.objection(Change("eviction", "heavy_hitter"), looked, state) is None
    assert "1.24%" in (budget.objection(Change("eviction", "window"), looked, state) or "")


def test_what_nobody_has_measured_is_refused() -> None:
    known = Losses({"native": 0.0, "int8": 0.001}, {})
    service = Service(guard(losses=known))
    for _ in range(500):
        service.tick(None)  # however much is saved
    refused = service.tick(Change("eviction", "window"))
    assert refused.code is VerdictCode.OVER_BUDGET
    assert "no figure for what eviction window loses" in refused.text
    nearer = service.tick(Change("kv_format", "int4"))
    assert nearer.change == Change("kv_format", "int8")
    assert "no figure for what kv_format int4 loses" in nearer.text
    assert service.tick(Change("kv_format", "int4")).code is VerdictCode.NO_CHANGE


def test_without_known_lengths_nothing_is_spent() -> None:
    service = Service(guard(), known=False)
    verdicts = [service.tick(Change("kv_format", "k8v4")) for _ in range(300)]
    assert {verdict.change for verdict in verdicts} == {None, Change("kv_format", "int8")}
    assert service.knobs["kv_format"] == "int8"


def test_what_was_in_force_at_the_start_is_handed_back() -> None:
    service = Service(guard())
    service.knobs |= {"kv_format": "int4", "eviction": "window"}
    for _ in range(5):
        service.tick(None)
    assert service.knobs["eviction"] == "none"
    assert service.knobs["kv_format"] == "int8"


def test_an_operators_knob_is_left_alone_and_others_pay_for_it() -> None:
    service = Service(guard())
    service.knobs["kv_format"] = "int4"
    service.writers["kv_format"] = Writer("operator:anna", 3, "trying")
    verdicts = [service.tick(Change("eviction", "heavy_hitter")) for _ in range(100)]
    assert {verdict.code for verdict in verdicts} == {VerdictCode.OVER_BUDGET}
    assert service.knobs["kv_format"] == "int4"


def test_the_mask_has_no_change_that_the_budget_refuses() -> None:
    service = Service(guard())
    for _ in range(3):
        service.tick(None)
    possible = service.guard.possible(GuardContext(service.observation()), service.state)
    assert Change("kv_format", "int8") in possible
    assert Change("kv_format", "int4") not in possible
    assert Change("eviction", "window") not in possible
    assert Change("block_size", 64) in possible


def test_a_loss_that_is_not_told_counts_as_what_the_settings_can_cost() -> None:
    budget, service = QualityBudget(BUDGET, LOSSES), Service(guard())
    service.knobs["kv_format"] = "int4"
    state = budget.brought_to(service.observation(), Charge(), budget.initial_state())
    service.second += 1
    state = budget.brought_to(service.observation(), Charge(100.0, None), state)
    assert state["purse"] == {"tokens": 100.0, "loss": pytest.approx(2.7)}
    again = budget.brought_to(service.observation(), Charge(100.0, None), state)
    assert again == state  # the same moment is paid for once


@pytest.mark.parametrize(
    "state", [{}, {"purse": 3}, {"stamp_ns": "x"}, {"spent": {"kv_format": "x"}}, {"loss_now": -1}]
)
def test_a_state_of_another_version_is_a_fresh_one(state: dict[str, object]) -> None:
    budget, service = QualityBudget(BUDGET, LOSSES), Service(guard())
    fresh = budget.initial_state()
    given_state = {**fresh, **state} if state else state
    assert budget.brought_to(service.observation(), None, given_state)["purse"] == fresh["purse"]


def test_a_profile_says_what_holds() -> None:
    profile = read_profile(DEFAULT_PROFILE)
    kept = guard_for(profile, BUDGET)
    assert "0.50%" in what_holds(kept)
    assert "estimated" in what_holds(kept)
    assert "no quality budget is kept" in what_holds(guard_for(profile, None))
    for nothing_measured in (None, profile.model_copy(update={"quality": None})):
        says = what_holds(guard_for(nothing_measured, BUDGET))
        assert "estimated, published" in says
        assert "refused" not in says
    formats_only = Quality(by_format={"int8": 0.001, "k8v4": 0.01})
    measured = what_holds(guard_for(profile.model_copy(update={"quality": formats_only}), BUDGET))
    assert "refused for want of figures: kv_format int4; eviction window, heavy_hitter" in measured
    assert "estimated" not in measured
    assert losses_of(profile).of_eviction("window") == 0.2
    status = quality_status(kept, kept.initial_state())
    assert status["lost_per_token"] is None
    with pytest.raises(ValueError, match="quality budget"):
        guard_for(profile, -1.0)


def test_a_change_of_the_guards_own_has_a_scenario_of_its_own() -> None:
    from policies.base import Decision

    wanted = Decision(Change("kv_format", "int4"), "memory-tight", "because")
    assert made(wanted, Verdict(VerdictCode.OVER_BUDGET, "no")) is wanted
    part = made(wanted, Verdict(VerdictCode.ALLOWED, "as far as", Change("kv_format", "int8"), is_short=True))
    assert (part.change, part.scenario) == (Change("kv_format", "int8"), "memory-tight")
    assert part.reason == "because; the guard: as far as"
    assert made(wanted, Verdict(VerdictCode.ALLOWED, "all of it", wanted.change)) is wanted
    own = made(wanted, Verdict(VerdictCode.HANDED_BACK, "spent", Change("kv_format", "int8")))
    assert (own.change, own.scenario, own.reason) == (Change("kv_format", "int8"), QUALITY_BUDGET, "spent")


def test_it_holds_in_the_simulated_engine_too() -> None:
    """By the simulator's exact charge, which readings only estimate: a policy that wants all that is lossy."""
    from envs.simulated import SimulatedEngine
    from policies.base import Decision, PolicyState
    from policies.play import Contender, play

    class Greedy:
        name = "greedy"

        def initial_state(self) -> PolicyState:
            return {"turn": 0}

        def decide(self, _: Observation, state: PolicyState) -> tuple[Decision, PolicyState]:
            wanted = [Change("kv_format", "int4"), Change("eviction", "window"), Change("kv_format", "k8v4")]
            return Decision(wanted[state["turn"] % 3], "greedy", ""), {"turn": state["turn"] + 1}

    def lost(*, budgeted: bool) -> float:
        env = SimulatedEngine(None, "reasoning-bursty", rate_scale=0.1, interval_s=2.0, warm_up_s=0.0, episode_s=90.0)
        who = Contender("greedy", Greedy(), budgeted=budgeted)
        return play(env, who, duration_s=90.0, interval_s=2.0, seed=3).quality_per_token

    assert lost(budgeted=False) > 2 * BUDGET
    assert lost(budgeted=True) <= BUDGET


def test_the_usual_budget_is_defined_once() -> None:
    root = Path(__file__).parents[2]
    files = [path for folder in ("policies", "autotune") for path in sorted((root / folder).rglob("*.py"))]
    having = {str(path.relative_to(root)) for path in files if re.search(r"\b0\.005\b", path.read_text("utf-8"))}
    assert having - {"autotune/demo/probe.py"} == {"policies/usual_budget.py"}  # that one is a share of a time
