"""Case A.4: quantising that only makes things slower, since memory is ample, is measured, taken back, and told."""

from __future__ import annotations

from typing import Any

from autotune.deliberation import Minds, made, think
from envs.port import Change
from envs.profile import Profile, read_profile
from envs.signals import Targets
from envs.simulated import DEFAULT_PROFILE, SimulatedEngine
from envs.spaces import NOTHING, Observation, encode_action
from envs.workload.trace import TraceRequest, from_requests
from policies.base import Decision
from policies.guard import Guard, GuardConfig, native_fits
from policies.judgement import JudgeConfig, Outcome
from policies.rollback import EffectWatch, WatchConfig

WINDOW_S = 10.0
TARGETS = Targets(ttft_s=2.0, tbt_s=0.15)
INT4 = Change("kv_format", "int4")


class Wanting:
    """Wants int4 whatever it is good for."""

    name = "wanting"

    def initial_state(self) -> dict[str, Any]:
        return {}

    def decide(self, observation: Observation, state: dict[str, Any]) -> tuple[Decision, dict[str, Any]]:
        there = observation.tunables["kv_format"] == "int4"
        return Decision(None if there else INT4, "want", "wanted"), state


def where_int4_is_slow() -> Profile:
    """A device on which attention over int4 takes so long that steps take several times as long."""
    profile = read_profile(DEFAULT_PROFILE)
    terms = {
        name: term.model_copy(update={"seconds": term.seconds * 100}) if name == "decode_kv_int4" else term
        for name, term in profile.latency.terms.items()
    }
    return profile.model_copy(update={"latency": profile.latency.model_copy(update={"terms": terms})})


def test_a4_slower_without_need_is_reverted_within_a_trial_window_and_the_figures_are_told() -> None:
    """Case A.4, simulated: what int4 cost is measured, taken back, not tried again, and told."""
    steady = from_requests("steady", [TraceRequest(0.5 * i, 600, 60) for i in range(300)])
    env = SimulatedEngine(
        where_int4_is_slow(), steady, rate_scale=1.0, interval_s=1.0, warm_up_s=0.0, episode_s=150.0, repeats=False,
        targets=TARGETS, short_s=WINDOW_S,
    )  # fmt: skip
    minds = Minds(
        Wanting(),
        Guard(GuardConfig(window_s=WINDOW_S), native_fits()),
        EffectWatch(WatchConfig(JudgeConfig(TARGETS), window_s=WINDOW_S)),
    )
    states = minds.initial_states()
    _, info = env.reset(seed=0)
    moves: list[tuple[int, str, str]] = []
    judged = []
    tokens: dict[str, list[int]] = {"native": [], "int4": []}
    for tick in range(120):
        observation: Observation = info["observation"]
        thought = think(minds, observation, {}, states)
        judged += thought.judged
        action, change = NOTHING, thought.verdict.change
        if change is not None:
            moves.append((tick, str(change), thought.decision.reason))
            thought = made(minds, thought, change, tick, observation)
            action = encode_action(change)
        states = thought.states
        _, _, _, _, info = env.step(action)
        tokens[str(observation.tunables["kv_format"])].append(env.last_figures.tokens)
        assert info["stats"].gauges.kv_usage < 0.5  # memory is ample
    (at, first, _), (back_at, second, why) = moves  # and it is not tried again under the same load
    assert (first, second) == ("kv_format=int4", "kv_format=native")
    assert back_at - at <= WINDOW_S + 1
    (judgement,) = judged
    assert judgement.outcome is Outcome.MISSED
    assert judgement.tick == at
    before, after = judgement.figures, info["observation"].values
    assert before["tbt_tail_s"] is not None
    assert after["tbt_tail_s"] is not None
    assert before["tbt_tail_s"] > 2 * after["tbt_tail_s"]  # as slow as it was, and as it is again
    assert f"-> {before['tbt_tail_s']:.3g} s" in why
    assert "the target is 0.15 s" in why
    assert minds.watch.wish(states.watch) is None
    slow = tokens["int4"][3:]
    assert sum(slow) / len(slow) < sum(tokens["native"][20:]) / len(tokens["native"][20:])
