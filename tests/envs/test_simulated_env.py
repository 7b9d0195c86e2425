"""The simulated environment against its specification, gymnasium's checker and stable-baselines3's."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from engine.tunables import TUNABLES
from envs import SIMULATED_ENGINE_ID, SIMULATED_STEPS, register_envs
from envs.port import Change
from envs.profile import read_profile
from envs.randomise import Randomisation
from envs.simulated import DEFAULT_PROFILE, SimulatedEngine
from envs.spaces import NOTHING, encode_action
from envs.workload.trace import TraceRequest, from_requests

QUIET = {"warm_up_s": 4.0, "episode_s": 60.0}
INT4 = encode_action(Change("kv_format", "int4"))
register_envs()


def make(**changes: Any) -> SimulatedEngine:
    return SimulatedEngine(**{**QUIET, **changes})


def walk(env: SimulatedEngine, actions: list[int]) -> list[Any]:
    """Everything an agent sees: vectors as bytes, rewards, true figures."""
    seen = []
    for action in actions:
        vector, reward, _, _, info = env.step(action)
        seen.append((vector.tobytes(), reward, tuple(info["true"].items())))
    return seen


def test_checkers_pass() -> None:
    sb3 = pytest.importorskip("stable_baselines3.common.env_checker")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(make(), skip_render_check=True)
        sb3.check_env(make())


def test_made_by_name_with_a_time_limit() -> None:
    env = gymnasium.make(SIMULATED_ENGINE_ID, rate_scale=0.01, **QUIET)
    env.reset(seed=1)
    for number in range(1, SIMULATED_STEPS + 1):
        _, _, terminated, truncated, _ = env.step(NOTHING)
        assert not terminated
        assert truncated == (number == SIMULATED_STEPS)


# -- seeding (case L.46) --------------------------------------------------------------------------------------------

EPISODES = """
import sys
sys.path[:0] = {path!r}
from envs.randomise import Randomisation
from envs.simulated import SimulatedEngine
env = SimulatedEngine(warm_up_s=4.0, episode_s=60.0, randomise=Randomisation.usual())
import hashlib
digest = hashlib.sha256()
env.reset(seed=42)
vector, info = env.reset()
digest.update(vector.tobytes())
for step in range(20):
    mask = info["action_mask"]
    vector, reward, _, _, info = env.step(int(mask.nonzero()[0][(7 * step) % mask.sum()]))
    digest.update(vector.tobytes() + repr((reward, info["true"], info["stats"].to_json())).encode())
print(digest.hexdigest())
"""


def test_the_unseeded_second_episode_is_the_same_in_every_process() -> None:
    """Case L.46 (Gymnasium#1084): reset(seed=42), reset(), 20 steps."""
    code = EPISODES.format(path=[str(Path(__file__).parents[2])])
    found = {
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


def test_seeds_make_episodes_and_episodes_differ() -> None:
    env = make(randomise=Randomisation.usual())
    actions = [NOTHING, INT4, NOTHING, NOTHING]
    env.reset(seed=42)
    env.reset()
    second = walk(env, actions)
    third = (env.reset(), walk(env, actions))[1]
    env.reset(seed=42)
    env.reset()
    assert walk(env, actions) == second
    assert third != second


def test_no_global_randomness_is_used_or_moved() -> None:
    import random

    np.random.seed(1)  # noqa: NPY002  # the point
    random.seed(1)
    before = (random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index,union-attr]  # noqa: NPY002
    env = make(randomise=Randomisation.usual())
    env.reset(seed=3)
    walk(env, [NOTHING] * 3)
    assert before == (random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index,union-attr]  # noqa: NPY002


def test_arrays_are_fresh_copies() -> None:
    """Gymnasium#1681: what one step returned must not change under the caller at the next."""
    env = make()
    first, info = env.reset(seed=1)
    kept, mask = first.copy(), info["action_mask"].copy()
    second, _, _, _, later = env.step(INT4)
    assert (first == kept).all()
    assert (info["action_mask"] == mask).all()
    first[:] = -1
    assert not np.shares_memory(first, second)
    assert not np.shares_memory(info["action_mask"], later["action_mask"])
    assert not np.shares_memory(env.action_masks(), env.action_masks())


# -- state ----------------------------------------------------------------------------------------------------------


def test_pickled_in_mid_episode_it_goes_on_the_same() -> None:
    env = make(randomise=Randomisation.usual(), workload="chat-shared-prefix")
    env.reset(seed=5)
    walk(env, [INT4, NOTHING, NOTHING])
    twin = pickle.loads(pickle.dumps(env))
    actions = [NOTHING, encode_action(Change("block_size", 64)), NOTHING, NOTHING]
    assert walk(env, actions) == walk(twin, actions)
    assert env.reset()[0].tobytes() == twin.reset()[0].tobytes()


def test_snapshots_can_be_restored_again_and_again() -> None:
    env = make(workload="reasoning-bursty")
    env.reset(seed=6)
    walk(env, [NOTHING] * 3)
    snapshot = env.snapshot()
    futures = []
    for action in (NOTHING, INT4, NOTHING):
        env.restore(snapshot)
        futures.append(walk(env, [action, NOTHING, NOTHING, NOTHING]))
        env.simulator.cache.check_integrity()
    assert futures[0] == futures[2]
    assert futures[0] != futures[1]


def test_a_snapshot_of_another_episode_brings_its_world_back() -> None:
    env = make(randomise=Randomisation.usual())
    env.reset(seed=6)
    _, _, _, _, info = env.step(NOTHING)
    snapshot, figures = env.snapshot(), env.last_figures
    env.reset()
    env.restore(snapshot)
    assert env.last_figures == figures
    _, _, _, _, later = env.step(NOTHING)
    assert later["world"] == info["world"]


@pytest.mark.parametrize("name", ["interval_s", "episode_s", "rate_scale", "warm_up_s"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_times_that_are_none_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        SimulatedEngine(**{name: value})


def test_vectorised_in_processes_and_by_gymnasium() -> None:
    vec = pytest.importorskip("stable_baselines3.common.vec_env")
    several = vec.SubprocVecEnv([make, make], start_method="fork")
    try:
        several.seed(3)
        assert several.reset().shape == (2, *several.observation_space.shape)
        assert several.step([NOTHING, INT4])[0].dtype == np.float32
    finally:
        several.close()
    batch = gymnasium.vector.SyncVectorEnv([make, make])
    vectors, _ = batch.reset(seed=[1, 1])
    assert (vectors[0] == vectors[1]).all()
    batch.step(np.array([NOTHING, NOTHING]))
    batch.close()


# -- what it does ---------------------------------------------------------------------------------------------------


def test_a_control_interval_passes_at_every_step() -> None:
    env = make(interval_s=2.0)
    env.reset(seed=1)
    start_ns = env.simulator.now_ns
    for number in range(1, 6):
        env.step(NOTHING)
        assert 0 <= env.simulator.now_ns - (start_ns // 10**9 * 10**9 + number * 2 * 10**9) < 10**9


def test_an_action_is_in_force_and_reported() -> None:
    env = make()
    env.reset(seed=1)
    _, _, _, _, info = env.step(INT4)
    assert info["applied"] == Change("kv_format", "int4")
    assert info["stats"].effective["kv_format"] == "int4"
    assert info["reward_terms"].switching > 0
    assert not info["action_mask"][INT4]
    _, _, _, _, info = env.step(INT4)  # its mask forbids it: nothing
    assert info["proposed"] == Change("kv_format", "int4")
    assert info["applied"] is None


def test_delay_and_lag_hold_changes_and_readings_back() -> None:
    env = make(actuation_delay_s=3.5, metric_lag_s=1.0, interval_s=2.0)
    env.reset(seed=1)
    _, _, _, _, info = env.step(INT4)
    assert env.simulator.stats().effective["kv_format"] == "native"  # 2 s of 3.5 s have passed
    assert info["stats"].stamp_ns <= env.simulator.now_ns - 0.5e9
    _, _, _, _, info = env.step(NOTHING)
    assert env.simulator.stats().effective["kv_format"] == "int4"
    assert info["stats"].effective["kv_format"] == "native"  # read after 3 s
    _, _, _, _, info = env.step(NOTHING)
    assert info["stats"].effective["kv_format"] == "int4"


def test_held_knobs_are_masked() -> None:
    env = make(held=("kv_format",))
    _, info = env.reset(seed=1)
    assert not info["action_mask"][INT4]
    _, _, _, _, info = env.step(INT4)
    assert info["applied"] is None


def test_true_figures_come_from_the_requests_themselves() -> None:
    """Two requests at rest, one of them late by design: nothing of it is estimated."""
    trace = from_requests("two", [TraceRequest(0.0, 16, 4), TraceRequest(5.0, 16, 4), TraceRequest(1e6, 1, 1)])
    env = make(workload=trace, rate_scale=1.0, warm_up_s=4.0)
    _, info = env.reset(seed=1)
    assert info["true"]["offered"] == info["true"]["completed"] == info["true"]["good"] == 1
    assert info["true"]["tokens"] == 4
    profile = read_profile(DEFAULT_PROFILE)
    _, _, _, _, info = env.step(NOTHING)
    assert info["true"]["offered"] == 1
    assert info["true"]["ttft_tail_s"] == pytest.approx(profile.latency.terms["step"].seconds, rel=0.2)
    assert info["true"]["violations"] == 0
    assert info["true"]["quality_per_token"] == 0.0
    late = make(workload=trace, rate_scale=1.0, targets=type(env._targets)(ttft_s=1e-3, tbt_s=1.0))
    _, info = late.reset(seed=1)
    assert info["true"]["violations"] == 1


def test_quality_is_charged_per_token_for_what_it_attended() -> None:
    env = make(workload="reasoning-bursty", values={"kv_format": "int4"})
    env.reset(seed=2)
    charged = [env.step(NOTHING)[4]["true"]["quality_per_token"] for _ in range(8)]
    assert 0.0 < max(charged) < 0.027  # all int4 would be 0.027; the recent tokens are native
    assert make().reset(seed=2)[1]["true"]["quality_per_token"] == 0.0


def test_rendering(capsys: pytest.CaptureFixture[str]) -> None:
    env = make(render_mode="human")
    env.reset(seed=1)
    env.step(INT4)
    assert "kv_format=int4" in capsys.readouterr().out
    assert make().render() is None
    with pytest.raises(ValueError, match="rgb_array"):
        make(render_mode="hologram")


def test_pictures() -> None:
    pytest.importorskip("matplotlib")
    env = make(render_mode="rgb_array")
    env.reset(seed=1)
    env.step(INT4)
    picture = env.render()
    assert picture.dtype == np.uint8
    assert picture.shape == (600, 900, 3)
    assert len(np.unique(picture)) > 10


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "envs.picture", None)
    env = make(render_mode="rgb_array")
    env.reset(seed=1)
    env.step(NOTHING)
    with pytest.raises(gymnasium.error.DependencyNotInstalled, match=r"kv-autotune\[plots\]"):
        env.render()


def test_stepping_before_reset_is_refused() -> None:
    with pytest.raises(gymnasium.error.ResetNeeded):
        make().step(NOTHING)


# -- randomisation --------------------------------------------------------------------------------------------------


def test_randomisation_off_changes_nothing_and_ranges_are_kept() -> None:
    env = make()
    _, info = env.reset(seed=1)
    world = info["world"]
    assert (world.service, world.prompts, world.outputs, world.rate, world.bursts, world.pool) == (1,) * 6
    assert (world.actuation_delay_s, world.metric_lag_s, world.jitter.deviation) == (0, 0, 0)
    assert world.model(env._model) == env._model
    rng = np.random.default_rng(1)
    usual = Randomisation.usual()
    for _ in range(200):
        world = usual.draw(rng)
        assert 0.7 <= world.service <= 1.4
        assert 0.5 <= world.rate <= 2.0
        assert 0 <= world.actuation_delay_s <= 0.5
        model = world.model(env._model)
        for name, value in model.seconds.items():
            assert 0.7 * 0.8 - 1e-9 <= value / env._model.seconds[name] <= 1.4 * 1.25 + 1e-9 if value else True


@pytest.mark.parametrize("bad", [{"rate": (0, 1)}, {"rate": (2, 1)}, {"jitter": (-1, 0)}])
def test_impossible_ranges_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="range"):
        Randomisation(**bad)


# -- endurance ------------------------------------------------------------------------------------------------------


def shaken(steps: int, seed: int, **changes: Any) -> None:
    """Random legal actions: finite, in their box, and the books agree."""
    env = make(episode_s=300.0, randomise=Randomisation.usual(), **changes)
    rng = np.random.default_rng(seed)
    _, info = env.reset(seed=seed)
    for number in range(steps):
        mask = info["action_mask"]
        vector, reward, _, _, info = env.step(int(rng.choice(np.flatnonzero(mask))))
        assert np.isfinite(vector).all()
        assert env.observation_space.contains(vector)
        assert np.isfinite(float(reward))
        if number % 50 == 0:
            env.simulator.cache.check_integrity()
        if number % 150 == 149:
            _, info = env.reset()


@pytest.mark.parametrize("workload", ["chat-bursty", "reasoning-bursty", "agent-shared-prefix"])
def test_random_actions_break_nothing(workload: str) -> None:
    shaken(60, 7, workload=workload)


def test_never_acting_and_always_int4_are_what_the_memory_model_says() -> None:
    """Under the same overload the pool fills natively; in int4 the same tokens take the bytes that the layout says."""
    held: dict[str, float] = {}
    for kv_format in ("native", "int4"):
        env = make(workload="reasoning-bursty", rate_scale=0.05, values={"kv_format": kv_format, "block_size": 32})
        env.reset(seed=3)
        for _ in range(20):
            stats = env.step(NOTHING)[4]["stats"]
        rows = {row.kv_format: row for row in stats.gauges.resident}
        row = rows[kv_format]
        held[kv_format] = row.bytes / row.tokens
        assert set(rows) == ({"native"} if kv_format == "native" else {"native", "int4"})
        assert set(TUNABLES["kv_format"].values) >= set(rows)
        if kv_format == "int4":
            assert rows["int4"].tokens > 2 * rows["native"].tokens
    told = stats.gauges.kv_bytes_per_token
    assert held["int4"] == pytest.approx(told["int4"], rel=1e-9)  # sealed blocks are full
    assert told["native"] <= held["native"] < 1.2 * told["native"]  # the last block of each sequence is not
