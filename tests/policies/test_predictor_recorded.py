"""The predictor decides on recorded observations as it did when they were recorded: making it faster changes nothing.

From four simulated workloads (chat-bursty, reasoning-bursty, code-bursty, diurnal) on the estimated L4 profile, one
tick each second. The budget of quality binds nowhere, so that how it is kept may change. A change of the arithmetic
that is meant needs the decisions recorded anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from envs.profile import read_profile
from envs.signals import Targets
from envs.simulated import DEFAULT_PROFILE
from envs.spaces import Observation
from policies.predictor_choice import PredictorConfig
from policies.predictor_of import predictor_of

FILE = Path(__file__).parent / "recorded" / "predictor.json"
RECORDED: dict[str, Any] = json.loads(FILE.read_text())


@pytest.mark.parametrize("recording", RECORDED["recordings"], ids=["chat", "reasoning", "code", "diurnal"])
def test_recorded_observations_are_decided_as_they_were(recording: dict[str, Any]) -> None:
    config = PredictorConfig(quality_budget=RECORDED["quality_budget"])
    policy = predictor_of(read_profile(DEFAULT_PROFILE), Targets(2.0, 0.25), config)
    state, decided, in_force = policy.initial_state(), [], dict(recording["in_force"])
    knobs = in_force[0]
    for tick, values in enumerate(recording["seen"]):
        knobs = in_force.get(tick, knobs)
        observation = Observation(
            tick * 10**9, dict(zip(RECORDED["values"], values, strict=True)),
            dict(zip(RECORDED["knobs"], knobs, strict=True)), observed_s=99.0, instance="a",
        )  # fmt: skip
        decision, state = policy.decide(observation, state)
        if decision.change is not None:
            decided.append([tick, decision.change.knob, decision.change.value, decision.scenario])
    assert decided == recording["decided"]
