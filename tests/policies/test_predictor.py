"""The predictor's choices, one situation at a time, and what holds whatever it sees."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.tunables import TUNABLES, TunableValue, default_values
from envs.features import FEATURES
from envs.profile import read_profile
from envs.signals import Targets
from envs.simulated import DEFAULT_PROFILE
from envs.spaces import Observation, all_changes
from policies.base import Change, Decision
from policies.predictor import PredictorPolicy
from policies.predictor_choice import PredictorConfig
from policies.predictor_of import predictor_of

TARGETS = Targets(2.0, 0.25)
PROFILE = read_profile(DEFAULT_PROFILE)
_CALM: dict[str, float | None] = {
    "offered_rps": 0.2, "offered_rps_long": 0.2, "prompt_tokens_p50": 810.0, "prompt_tokens_p95": 4000.0,
    "output_tokens_p50": 143.0, "output_tokens_p95": 600.0, "running": 2.0, "waiting": 0.0, "decode_tps": 40.0,
    "tokens_per_sequence": 1400.0, "hit_rate": 0.0, "bytes_share_native": 1.0, "bytes_share_int8": 0.0,
    "bytes_share_k8v4": 0.0, "bytes_share_int4": 0.0,
}  # fmt: skip
_CROWDED: dict[str, float | None] = {
    "offered_rps": 1.2, "offered_rps_long": 1.2, "running": 27.0, "waiting": 8.0, "decode_tps": 220.0,
}  # fmt: skip


def seen(
    second: float = 0.0, knobs: dict[str, TunableValue] | None = None, values: dict[str, float | None] | None = None
) -> Observation:
    known: dict[str, float | None] = {**dict.fromkeys((f.name for f in FEATURES), None), **_CALM, **(values or {})}
    return Observation(round(second * 1e9), known, {**default_values(), **(knobs or {})}, observed_s=99.0, instance="a")


def policy(config: PredictorConfig | None = None) -> PredictorPolicy:
    return predictor_of(PROFILE, TARGETS, config)


class Session:
    """Ticks once per second; a proposal is taken unless ``takes`` is off."""

    def __init__(
        self, *, takes: bool = True, config: PredictorConfig | None = None, held: tuple[str, ...] = ()
    ) -> None:
        self.policy = policy(config)
        self.state = self.policy.initial_state()
        self.knobs = default_values()
        self.second = 0
        self.changes: list[tuple[int, Change]] = []
        self.last: Decision | None = None
        self._takes, self._held = takes, frozenset(held)

    def run(self, seconds: int, **values: float | None) -> Session:
        for _ in range(seconds):
            observation = replace(seen(self.second, self.knobs, values), held=self._held)
            decision, self.state = self.policy.decide(observation, self.state)
            if decision.change is not None:
                self.last = decision
                self.changes.append((self.second, decision.change))
                if self._takes:
                    self.knobs[decision.change.knob] = decision.change.value
            self.second += 1
        return self


def test_memory_pressure_asks_for_a_lossier_format_within_the_budget() -> None:
    session = Session().run(30, **_CROWDED)
    assert session.knobs["kv_format"] == "int8"
    assert session.last is not None
    for word in ("TTFT", "TBT", "requests/s", "loss", "KV"):
        assert word in session.last.reason


def test_a_smaller_pool_than_the_profiles_is_pressure_sooner() -> None:
    """The load is calm for the profile's pool; the engine tells of one of a quarter of it."""
    asked = []
    for size in (None, PROFILE.pool_bytes // 4):
        one = policy()
        state, made = one.initial_state(), []
        for second in range(12):
            observation = replace(seen(second, values={"running": 6.0, "offered_rps": 0.4}), pool_bytes=size)
            decision, state = one.decide(observation, state)
            made.append(decision.change)
        asked.append({change.knob for change in made if change is not None})
    assert "kv_format" not in asked[0]
    assert "kv_format" in asked[1]


def test_idle_goes_back_to_native() -> None:
    session = Session().run(30, **_CROWDED)
    assert session.knobs["kv_format"] != "native"
    session.run(900, offered_rps=0.0, offered_rps_long=0.0, running=0.0, decode_tps=0.0, prompt_tokens_p50=None,
                prompt_tokens_p95=None, output_tokens_p50=None, output_tokens_p95=None)  # fmt: skip
    assert session.knobs["kv_format"] == "native"


def test_prefill_that_hurts_gaps_asks_for_smaller_chunks() -> None:
    session = Session()
    session.knobs["max_num_batched_tokens"] = 2048
    session.run(30, offered_rps=0.9, offered_rps_long=0.9, running=18.0, decode_tps=160.0)
    assert session.knobs["max_num_batched_tokens"] in {64, 128, 256, 512}


def test_few_sequences_where_memory_is_ample_ask_for_more() -> None:
    session = Session()
    session.knobs["max_num_seqs"] = 4
    session.run(30, offered_rps=0.5, offered_rps_long=0.5, running=4.0, waiting=6.0, decode_tps=45.0)
    assert session.knobs["max_num_seqs"] in {8, 16, 32, 64, 128, 256}


def test_a_limit_that_shuts_load_out_is_lifted_at_once() -> None:
    """Long outputs after short ones: few have ended, and few sequences may run. Nobody waits 45 s for that."""
    short: dict[str, float | None] = {"offered_rps": 2.0, "offered_rps_long": 2.0, "output_tokens_p50": 20.0,
                                      "output_tokens_p95": 60.0, "decode_tps": 44.0, "completed_rps": 2.0}  # fmt: skip
    stuck = {**short, "running": 4.0, "waiting": 60.0, "completed_rps": 0.1}
    session = Session()
    session.knobs["max_num_seqs"] = 4
    session.state = {**session.state, "moved": {"max_num_seqs": 0.0}, "set_at": {"max_num_seqs": None}}
    session.run(10, **stuck)
    assert session.knobs["max_num_seqs"] > 4
    keeps_up = Session()
    keeps_up.knobs["max_num_seqs"] = 4
    keeps_up.state = {**keeps_up.state, "moved": {"max_num_seqs": 0.0}, "set_at": {"max_num_seqs": None}}
    keeps_up.run(10, **{**stuck, "completed_rps": 2.0})
    assert keeps_up.knobs["max_num_seqs"] == 4


def test_calm_load_changes_nothing() -> None:
    assert Session().run(300).changes == []


def test_steady_load_with_noise_settles() -> None:
    """After five minutes at most one change, and none that undoes another."""
    rng = random.Random(1)
    for rate in (0.1, 0.3, 0.5, 0.8, 1.1, 1.6, 3.0):
        session = Session()
        for _ in range(1200):
            noisy: dict[str, float | None] = {
                "offered_rps": rate * (1 + 0.05 * rng.gauss(0, 1)),
                "offered_rps_long": rate * (1 + 0.02 * rng.gauss(0, 1)),
                "running": min(26.0, 15 * rate) * (1 + 0.05 * rng.gauss(0, 1)),
                "waiting": max(0.0, 10 * (rate - 1.1)) * (1 + 0.05 * rng.gauss(0, 1)),
                "decode_tps": 200 * min(rate, 1.2) * (1 + 0.05 * rng.gauss(0, 1)),
            }  # fmt: skip
            session.run(1, **noisy)
        late = [change for second, change in session.changes if second > 300]
        assert len(late) <= 1, (rate, late)
        moved = [change.knob for change in late]
        assert len(moved) == len(set(moved))


def test_lossy_formats_are_paid_for() -> None:
    """Without a budget nothing lossy is touched, however full it is."""
    free = PredictorConfig(quality_budget=0.0)
    assert Session(config=free).run(60, **_CROWDED).knobs["kv_format"] == "native"
    rich = PredictorConfig(quality_budget=1.0)
    knobs = Session(config=rich).run(60, **{**_CROWDED, "waiting": 40.0}).knobs
    assert (knobs["kv_format"], knobs["eviction"]) != ("native", "none")
    with pytest.raises(ValueError, match="quality budget"):
        PredictorConfig(quality_budget=-1.0)


def test_what_the_budget_cannot_bear_is_left() -> None:
    session = Session()
    session.knobs["kv_format"] = "int4"
    session.run(60, **_CROWDED, bytes_share_native=0.0, bytes_share_int4=1.0)
    assert session.knobs["kv_format"] in {"native", "int8"}


def test_a_refused_change_gives_way() -> None:
    session = Session(takes=False).run(60, **_CROWDED)
    asked = [change for _, change in session.changes]
    assert asked
    assert len(set(asked)) > 1
    assert max(asked.count(change) for change in set(asked)) < 40


def test_held_knobs_are_left_alone() -> None:
    session = Session(held=("kv_format",)).run(60, **_CROWDED)
    assert all(change.knob != "kv_format" for _, change in session.changes)
    assert Session(held=tuple(TUNABLES)).run(60, **_CROWDED).changes == []


def test_a_lost_engine_and_unknown_knobs_change_nothing() -> None:
    one = policy()
    lost = replace(seen(), instance=None, tunables={})
    assert one.decide(lost, one.initial_state())[0].change is None
    partly = replace(seen(values=_CROWDED), tunables={"kv_format": "native"})
    assert one.decide(partly, one.initial_state())[0].change is None


_figure = st.one_of(
    st.none(),
    st.floats(allow_nan=True, allow_infinity=True),
    st.floats(0, 1e6),
    st.sampled_from([0.0, 1.0, -1.0, 1e300]),
)
_observations = st.builds(
    Observation,
    stamp_ns=st.integers(-(10**12), 10**15),
    values=st.dictionaries(st.sampled_from([f.name for f in FEATURES]), _figure),
    tunables=st.fixed_dictionaries(
        {}, optional={name: st.sampled_from(tunable.values) for name, tunable in TUNABLES.items()}
    ),
    held=st.frozensets(st.sampled_from(list(TUNABLES))),
    observed_s=st.floats(0, 1e6),
    instance=st.sampled_from([None, "a", "b"]),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(_observations, max_size=6))
def test_whatever_is_seen_nothing_raises_and_no_illegal_change_comes(observations: list[Observation]) -> None:
    one = policy()
    state, possible = one.initial_state(), set(all_changes())
    for observation in observations:
        before = json.dumps(state, allow_nan=False)
        decision, after = one.decide(observation, state)
        assert json.dumps(state) == before
        again, _ = one.decide(observation, json.loads(before))
        assert again == decision
        if decision.change is not None:
            assert decision.change in possible
            assert decision.change.knob not in observation.held
            assert observation.tunables[decision.change.knob] != decision.change.value
        state = after


_broken = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(policy().initial_state())), _broken)
def test_a_state_of_another_shape_is_survived(key: str, value: object) -> None:
    one = policy()
    _, state = one.decide(seen(values=_CROWDED), {**one.initial_state(), key: value})
    decision, after = one.decide(seen(1.0, values=_CROWDED), state)
    assert decision.scenario
    assert not any(isinstance(part, float) and math.isnan(part) for part in after.values())
    json.dumps(after, allow_nan=False)
