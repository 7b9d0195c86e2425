"""The live environment against its specification, over a port made of a few lines."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from engine.clock import ManualClock
from engine.stats import EngineStats, Gauges
from engine.tunables import default_values
from envs import LIVE_ENGINE_ID, register_envs
from envs.live import LiveEngine
from envs.port import ApplyResult, ApplyStatus, Change
from envs.spaces import NOTHING, Observation, encode_action


class FakePort:
    """An engine that serves one request per second and takes every change at once."""

    def __init__(self) -> None:
        self.values = default_values()
        self.instance: str | None = "a"
        self.seconds = 0
        self.written: list[Change] = []
        self.answer = ApplyStatus.APPLIED

    def read(self) -> EngineStats | None:
        if self.instance is None:
            return None
        self.seconds += 1
        stats = EngineStats(
            self.instance, "m", self.seconds * 10**9, 4096, 64, len(self.written), dict(self.values),
            gauges=Gauges(running=1, kv_usage=0.25),
        )  # fmt: skip
        stats.counters.requests_offered = stats.counters.requests_completed = self.seconds
        stats.ttft.observe(0.1, times=self.seconds)
        return stats

    def apply(self, change: Change) -> ApplyResult:
        self.written.append(change)
        if self.answer is not ApplyStatus.APPLIED:
            return ApplyResult(self.answer, "no")
        self.values[change.knob] = change.value
        return ApplyResult(self.answer, "", change, len(self.written))


class FrozenPort(FakePort):
    """One and the same reading for ever."""

    def read(self) -> EngineStats | None:
        self.seconds = 0
        return super().read()


def step(env: LiveEngine, action: int) -> tuple[Observation, float, bool, dict[str, Any]]:
    vector, reward, terminated, truncated, info = env.step(action)
    assert terminated is False
    assert env.observation_space.contains(vector)
    return info["observation"], float(reward), truncated, info


INT8 = encode_action(Change("kv_format", "int8"))
NATIVE = encode_action(Change("kv_format", "native"))


def test_gymnasiums_checker_passes() -> None:
    register_envs()
    register_envs()
    env = gymnasium.make(LIVE_ENGINE_ID, port=FrozenPort(), clock=ManualClock())
    check_env(env.unwrapped)
    spec = gymnasium.spec(LIVE_ENGINE_ID)
    assert spec.nondeterministic
    assert spec.max_episode_steps is None


def test_reset_reads_and_changes_nothing() -> None:
    port = FakePort()
    port.values["kv_format"] = "int4"
    env = LiveEngine(port)
    vector, info = env.reset(seed=1)
    assert port.written == []
    assert info["observation"].tunables["kv_format"] == "int4"
    assert info["observation"].observed_s == 0
    assert info["observation"].values["offered_rps"] is None
    assert env.observation_space.contains(vector)
    step(env, NOTHING)
    assert env.observation.observed_s == 1
    env.reset()
    assert env.observation.observed_s == 0


def test_an_action_is_written_once_and_reported() -> None:
    port = FakePort()
    env = LiveEngine(port, clock=ManualClock(5))
    env.reset()
    observation, reward, truncated, info = step(env, INT8)
    assert port.written == [Change("kv_format", "int8")]
    assert (info["proposed"], info["applied"]) == (Change("kv_format", "int8"), Change("kv_format", "int8"))
    assert observation.tunables["kv_format"] == "int8"
    assert observation.values["since_change_s"] == 0
    assert observation.stamp_ns == 5
    assert not truncated
    assert reward == pytest.approx(1.0 - 0.05)  # one request inside targets, one background change
    _, reward, _, info = step(env, NOTHING)
    assert reward == pytest.approx(1.0)
    assert (info["proposed"], info["applied"], info["result"]) == (None, None, None)
    assert port.written == [Change("kv_format", "int8")]


@pytest.mark.parametrize("status", [ApplyStatus.REJECTED, ApplyStatus.CONFLICT, ApplyStatus.REFUSED, ApplyStatus.LOST])
def test_what_was_refused_is_proposed_and_not_applied(status: ApplyStatus) -> None:
    port = FakePort()
    port.answer = status
    env = LiveEngine(port)
    env.reset()
    observation, reward, _, info = step(env, INT8)
    assert info["proposed"] == Change("kv_format", "int8")
    assert info["applied"] is None
    assert info["result"].status is status
    assert observation.tunables["kv_format"] == "native"
    assert reward == pytest.approx(1.0)


def test_masked_actions_do_nothing() -> None:
    port = FakePort()
    held: list[str] = []
    env = LiveEngine(port, held=lambda: held)
    env.reset()
    _, _, _, info = step(env, NATIVE)  # there already
    assert info["proposed"] == Change("kv_format", "native")
    assert info["applied"] is None
    held.append("kv_format")
    step(env, NOTHING)
    assert env.action_masks()[INT8] == 0
    step(env, INT8)
    assert port.written == []
    with pytest.raises(ValueError, match="outside"):
        env.act(10_000)


def test_truncates_when_the_engine_is_lost_and_recovers() -> None:
    port = FakePort()
    env = LiveEngine(port)
    env.reset()
    step(env, NOTHING)
    port.instance = None
    observation, reward, truncated, info = step(env, INT8)
    assert truncated
    assert info["stats"] is None
    assert observation.instance is None
    assert reward == pytest.approx(-0.05)  # nothing is known but that a change was made
    port.instance = "b"
    observation, reward, truncated, _ = step(env, NOTHING)
    assert not truncated
    assert observation.values["offered_rps"] is None
    assert reward == 0
    port.instance = "c"
    observation, _, truncated, _ = step(env, NOTHING)
    assert truncated
    assert observation.observed_s == 0
    assert observation.values["offered_rps"] is None


def test_reset_without_an_engine_is_all_unknown() -> None:
    port = FakePort()
    port.instance = None
    env = LiveEngine(port)
    vector, info = env.reset()
    assert env.observation_space.contains(vector)
    assert set(info["observation"].values.values()) == {None}
    _, _, truncated, _ = step(env, INT8)
    assert truncated
    assert port.written == []


def test_halves_of_a_step_leave_the_wait_to_the_caller() -> None:
    port = FakePort()
    env = LiveEngine(port)
    env.reset()
    result = env.act(INT8)
    assert result is not None
    assert result.took_effect
    port.seconds += 4  # the caller's tick
    _, _, _, _, info = env.observe()
    assert info["applied"] == Change("kv_format", "int8")
    assert info["observation"].observed_s == 5


def test_spaces_do_not_depend_on_numpys_integers() -> None:
    env = LiveEngine(FakePort())
    env.reset()
    step(env, np.int64(INT8))  # type: ignore[arg-type]
    assert env.observation.tunables["kv_format"] == "int8"


@pytest.mark.parametrize(("short_s", "long_s"), [(0, 10), (20, 10), (-1, 10)])
def test_windows_are_checked(short_s: float, long_s: float) -> None:
    with pytest.raises(ValueError, match="short_s"):
        LiveEngine(FakePort(), short_s=short_s, long_s=long_s)


def imported_by(statement: str, probe: Callable[[str], str]) -> set[str]:
    code = f"{statement}\nimport sys\nprint(' '.join(n for n in {probe('sys.modules')}))"
    return set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())


def test_what_the_daemon_imports_is_light() -> None:
    statement = "import envs.live, policies.guard, policies.threshold, policies.rules"
    names = imported_by(statement, lambda modules: f"[m for m in {modules} if '.' not in m]")
    assert "numpy" in names
    assert not names & {"torch", "stable_baselines3", "triton", "numba", "pandas", "matplotlib"}
    assert not imported_by("import envs, policies", lambda m: f"{{'numpy', 'gymnasium', 'torch'}} & set({m})")
