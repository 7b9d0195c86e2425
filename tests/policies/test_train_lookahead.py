"""Learning by trying: what is tried, that copies leave the original alone, and that the network learns what paid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sb3_contrib", reason="the extra 'train' is not installed")
import torch
from toy_runs import last, recipe, rows, run, weights
from toy_training import DOWN, UP, Ticks, Toy, right, toys

from envs.profile import read_profile
from envs.simulated import DEFAULT_PROFILE, SimulatedEngine
from envs.spaces import NOTHING, encode_action
from policies.base import Change
from policies.card import PolicyFileError
from policies.train.archive import POLICY, read_states
from policies.train.env import TrainingEnv
from policies.train.lessons import LESSONS, read_lessons
from policies.train.lookahead import NONE, Studied, study
from policies.train.recipe import Lookahead, Recipe, Source, WarmStart, read_recipe
from policies.train.session import BEST, _Run, train
from policies.train.traffic import Traffic
from policies.train.worth import Trials

PROFILE = read_profile(DEFAULT_PROFILE)
PLAN = Lookahead(rounds=3, every=2, tries=3, epochs=60, batch_size=16, learning_rate=1e-2)
INT8, INT4 = (encode_action(Change("kv_format", value)) for value in ("int8", "int4"))


class Still:
    """A student that does nothing."""

    masked = True

    def act(self, vector: Any, mask: Any) -> int:  # noqa: ARG002
        return NOTHING


def studied(number: int, plan: Lookahead = PLAN) -> Studied:
    made = recipe()
    return study(Toy(made, 0), number, Still(), plan, np.random.default_rng(number))  # type: ignore[arg-type]


def test_nothing_is_tried_first_and_all_of_it_is_allowed() -> None:
    found = studied(0)
    assert len(found.seen) == 16
    assert len(found.actions) == 8
    assert (found.actions[:, 0] == NOTHING).all()
    up = encode_action(UP)
    assert {*found.actions[:, 1].tolist()} == {up}  # all that may be done: the toy stays at native
    assert (found.actions[:, 2:] == NONE).all()
    assert found.outcome["source"] == "toy"


def test_worths_tell_what_paid() -> None:
    found = studied(1)
    loads = found.vectors[:, 0] > 0.5  # the first feature
    np.testing.assert_array_equal(found.worths[:, 1] > found.worths[:, 0], loads)


def test_trials_are_bounded_and_one_episode_in_eight_is_watched() -> None:
    trials = Trials.of([studied(number) for number in range(9)])
    beyond = trials.advantages(Lookahead(unit=0.01, margin=1.0, most=20.0))
    assert beyond.min() == -20.0
    assert beyond.max() == 20.0
    assert trials.watched.sum() == 8
    assert np.flatnonzero(trials.watched)[0] == 7 * 8


def test_a_network_learns_what_pays_by_trying_alone(tmp_path: Path) -> None:
    made = recipe(steps=64, lookahead=PLAN.model_copy(update={"rounds": 6}), judge_every=100)
    found = run(made, tmp_path / "run")
    assert found["learned"] > 0.95  # doing nothing is right half of the time
    row = [row["lookahead"] for row in rows(tmp_path / "run") if "lookahead" in row][-1]
    assert row["rounds"] == 6
    assert row["got"] == pytest.approx(row["best"], rel=0.05)
    assert row["explained"] > 0.9


def test_a_run_that_stopped_between_rounds_ends_with_the_same_weights(tmp_path: Path) -> None:
    made = recipe(steps=128, lookahead=PLAN)
    run(made, tmp_path / "whole")

    class Stop(Exception):  # noqa: N818
        pass

    def tell(progress: Any, text: str) -> None:
        if progress.rounds == 2 and "held-out score" in text:
            raise Stop

    with pytest.raises(Stop):
        train(made, tmp_path / "parts", toys(made), teacher=right(), clock=Ticks(), tell=tell)
    run(read_recipe(tmp_path / "parts"), tmp_path / "parts", resume=True)
    assert weights(tmp_path / "parts", last(tmp_path / "parts")) == weights(
        tmp_path / "whole", last(tmp_path / "whole")
    )


class Stop(Exception):  # noqa: N818
    pass


def _interrupted(made: Recipe, folder: Path, at: int) -> None:
    """Ends at the ``at``-th thing that is said."""
    said: list[str] = []

    def tell(_: Any, text: str) -> None:
        if text:
            said.append(text)
        if len(said) == at:
            raise Stop

    with pytest.raises(Stop):
        train(made, folder, toys(made), teacher=right(), clock=Ticks(), tell=tell)


@pytest.mark.parametrize("plan", [None, PLAN.model_copy(update={"rounds": 1})])
def test_wherever_a_run_is_interrupted_it_ends_as_if_it_had_not_been(plan: Lookahead | None, tmp_path: Path) -> None:
    """From its first words on: weights, statistics, counters and metrics."""
    made = recipe(steps=64, lookahead=plan, judge_every=1)
    run(made, tmp_path / "whole")
    for at in range(1, 5) if plan is None else range(1, 7):
        _interrupted(made, tmp_path / str(at), at)
        run(made, tmp_path / str(at), resume=True)
        whole, parts = ((folder / last(folder)) for folder in (tmp_path / "whole", tmp_path / str(at)))
        assert weights(parts.parents[1], last(parts.parents[1])) == weights(whole.parents[1], last(whole.parents[1]))
        assert json.loads((parts / "state.json").read_text()) == json.loads((whole / "state.json").read_text())
        assert rows(parts.parents[1]) == rows(whole.parents[1])


def test_a_run_that_ended_while_its_only_checkpoint_was_replaced_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, rename, seen = recipe(steps=64, lookahead=PLAN), Path.rename, []

    def cut_off(self: Path, target: Path) -> Any:
        if self.name == "000000000000.new":
            seen.append(self)
            if len(seen) == 2:
                raise Stop
        return rename(self, target)

    run(made, tmp_path / "whole")
    monkeypatch.setattr(Path, "rename", cut_off)
    with pytest.raises(Stop):
        run(made, tmp_path / "parts")
    monkeypatch.undo()
    run(made, tmp_path / "parts", resume=True)
    assert weights(tmp_path / "parts", last(tmp_path / "parts")) == weights(
        tmp_path / "whole", last(tmp_path / "whole")
    )


def test_a_single_watched_trial_still_tells_how_well_it_is_explained(tmp_path: Path) -> None:
    """Of one figure there is no spread, which is no reason to forget what was learnt."""
    plan = Lookahead(rounds=2, every=16, tries=1)
    run(recipe(steps=64, lookahead=plan), tmp_path / "run")
    found = [row["lookahead"] for row in rows(tmp_path / "run") if "lookahead" in row]
    assert len(found) == 2
    assert all(np.isfinite(value) for row in found for value in row.values())


def test_outputs_are_sharpened_once_however_often_a_run_is_resumed(tmp_path: Path) -> None:
    made = recipe(steps=64, lookahead=PLAN)
    run(made, tmp_path / "run")
    before = weights(tmp_path / "run", last(tmp_path / "run"))
    run(made, tmp_path / "run", resume=True)
    assert weights(tmp_path / "run", last(tmp_path / "run")) == before


def test_rounds_that_made_it_worse_are_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reinforcement goes on from the best, with the preferences that imitation had."""
    begun = []

    def spoil(model: Any, *_: Any) -> dict[str, float]:
        with torch.no_grad():
            model.policy.action_net.bias.copy_(10.0 * torch.arange(len(model.policy.action_net.bias)))
        return {"rows": 1.0, "best": 0.0, "got": 0.0, "explained": 0.0}

    monkeypatch.setattr("policies.train.rounds.fit", spoil)
    whole = _Run.learn
    monkeypatch.setattr(_Run, "learn", lambda self: (begun.append(_arrays(self.algorithm)), whole(self))[1])
    run(recipe(steps=16, lookahead=PLAN, warm_start=WarmStart(rounds=3, epochs=60)), tmp_path / "run")
    held_out = [row["held_out"]["score"] for row in rows(tmp_path / "run") if "held_out" in row and "policy" not in row]
    assert held_out[0] > max(held_out[1:4])
    best = read_states(tmp_path / "run" / BEST / "model.zip")[POLICY]
    for name, value in begun[0].items():
        by = PLAN.sharpen if name.startswith("action_net") else 1.0
        np.testing.assert_allclose(value, by * best[name].numpy(), rtol=1e-5)


def _arrays(model: Any) -> dict[str, Any]:
    return {name: value.numpy().copy() for name, value in model.policy.state_dict().items()}


def test_damaged_lessons_are_refused_in_one_line(tmp_path: Path) -> None:
    run(recipe(steps=64, lookahead=PLAN), tmp_path / "run")
    assert len(read_lessons(tmp_path / "run", 3)) == 12
    path = tmp_path / "run" / LESSONS / "000001.npz"
    whole = path.read_bytes()
    other, short, packed = tmp_path / "other.npy", tmp_path / "short.npz", tmp_path / "packed.npz"
    np.save(other, np.zeros(3))
    np.savez(short, vectors_0=np.zeros((2, 3), np.float32), actions_0=np.zeros((1, 3), np.int64), worths_0=np.zeros(1))
    np.savez_compressed(packed, vectors_0=np.zeros((2, 3), np.float32))
    torn = bytearray(packed.read_bytes())
    torn[len(torn) // 3 : len(torn) // 2] = bytes(len(torn) // 2 - len(torn) // 3)
    for damaged in (
        b"PK nothing", b"", whole[: len(whole) // 2], other.read_bytes(), short.read_bytes(), packed.read_bytes(), torn,
    ):  # fmt: skip
        path.write_bytes(damaged)
        with pytest.raises(PolicyFileError, match=r"000001\.npz"):
            read_lessons(tmp_path / "run", 3)
    path.unlink()
    with pytest.raises(PolicyFileError, match="No such file"):
        read_lessons(tmp_path / "run", 3)


def test_it_is_for_networks_of_preferences() -> None:
    with pytest.raises(ValueError, match="looking ahead"):
        recipe("dqn", lookahead=PLAN)


def _pressed() -> TrainingEnv:
    source = Source(workload="chat-bursty", rate_scale=0.2, ttft_target_s=2.0, tbt_target_s=0.2)
    made = Recipe(steps=1, sources=[source], episode_steps=20, randomise=False)
    env = TrainingEnv(made, PROFILE, Traffic(made), 0)
    env.play_apart(0)
    env.reset()
    return env


def test_trying_leaves_the_engine_where_it_was() -> None:
    tried, untouched = _pressed(), _pressed()
    for _ in range(4):
        tried.step(NOTHING)
        untouched.step(NOTHING)
    first = tried.worths([NOTHING, INT8, INT4], PLAN)
    np.testing.assert_array_equal(first, tried.worths([NOTHING, INT8, INT4], PLAN))
    np.testing.assert_array_equal(first[::-1], tried.worths([INT4, INT8, NOTHING], PLAN))
    for _ in range(4):
        ours, theirs = tried.step(NOTHING), untouched.step(NOTHING)
        np.testing.assert_array_equal(ours[0], theirs[0])
        assert ours[1] == theirs[1]


def test_doing_nothing_is_foreseen_as_it_comes() -> None:
    engine = SimulatedEngine(PROFILE, "chat-bursty", rate_scale=0.2)
    engine.reset(seed=3)
    ahead = engine.foresee([NOTHING], 20.0)[0]
    good = sum(engine.step(NOTHING)[4]["true"]["good"] for _ in range(10))
    assert ahead.figures.good == pytest.approx(good, abs=1)  # the last step boundary differs
    assert good > 0


def test_foreseeing_what_cannot_be_leaves_no_trace() -> None:
    tried, untouched = (SimulatedEngine(PROFILE, "chat-bursty", rate_scale=0.2) for _ in range(2))
    for engine in (tried, untouched):
        engine.reset(seed=3)
    for horizon_s in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="horizon"):
            tried.foresee([INT8], horizon_s)
    with pytest.raises(ValueError, match="action"):
        tried.foresee([INT8, 10**6], 4.0)
    for _ in range(3):
        np.testing.assert_array_equal(tried.step(NOTHING)[0], untouched.step(NOTHING)[0])


def test_stretched_workloads_have_other_lengths_and_other_names() -> None:
    plain, long = (
        Source(workload="chat-bursty", rate_scale=0.1),
        Source(workload="chat-bursty", rate_scale=0.1, prompt_scale=0.5, output_scale=3.0),
    )
    assert (plain.name, long.name) == ("chat-bursty", "chat-bursty:0.5:3")
    ours, theirs = (
        Traffic(Recipe(steps=1, sources=[source])).training(0, 0).trace.requests for source in (plain, long)
    )
    assert len(ours) == len(theirs)
    ratio = sum(r.output_tokens for r in theirs) / sum(r.output_tokens for r in ours)
    assert ratio == pytest.approx(3.0, rel=0.05)
    assert sum(r.prompt_tokens for r in theirs) < 0.6 * sum(r.prompt_tokens for r in ours)


def test_lengths_of_a_trace_are_not_stretched() -> None:
    with pytest.raises(ValueError, match="only workloads are stretched"):
        recipe(sources=[Source(trace="own.csv", prompt_scale=2.0)])


def test_a_recipe_of_before_is_still_read(tmp_path: Path) -> None:
    made = recipe(sources=[Source(workload="chat-bursty")])
    data = made.model_dump(mode="json")
    del data["lookahead"]
    for source in data["sources"]:
        del source["prompt_scale"], source["output_scale"]
    (tmp_path / "recipe.json").write_text(json.dumps(data))
    assert read_recipe(tmp_path) == made
    assert encode_action(DOWN) != encode_action(UP)
