"""Predicted effects: the arithmetic by itself, and against the simulator."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.tunables import TUNABLES, TunableValue, default_values
from envs.features import FEATURES
from envs.port import Change
from envs.profile import Profile, read_profile
from envs.reward import literature_quality
from envs.signals import Targets
from envs.spaces import Observation
from policies.bench_effects import PROFILES, known_load, measure, native_rps, spearman
from policies.candidates import Candidates, changes
from policies.effects import KNOBS, Effect, EffectModel, places_of
from policies.load import Lengths, Load, forecast_rps, load_of
from policies.predicted_effect import predicted_effect
from policies.predictor_of import effect_model_of
from policies.quality_purse import Purse


def seen(**values: float | None) -> Observation:
    known: dict[str, float | None] = {
        **dict.fromkeys((f.name for f in FEATURES), None), "offered_rps": 0.2, "offered_rps_long": 0.2,
        "prompt_tokens_p50": 810.0, "prompt_tokens_p95": 4000.0, "output_tokens_p50": 143.0, "output_tokens_p95": 600.0,
        **values,
    }  # fmt: skip
    return Observation(0, known, default_values(), observed_s=99.0, instance="a")


CHAT = Load(1.0, Lengths.of(810, 4000) or Lengths(0, 0), Lengths.of(143, 600) or Lengths(0, 0))


@pytest.fixture(scope="module")
def profile() -> Profile:
    return read_profile(PROFILES / "llama3_8b_l4_estimated.yaml")


@pytest.fixture(scope="module")
def model(profile: Profile) -> EffectModel:
    return effect_model_of(profile, Targets(2.0, 0.25))


def predict(model: EffectModel, load: Load = CHAT, **values: TunableValue) -> Effect:
    return model.effects(np.array([places_of({**default_values(), **values})]), load).row(0)


def test_lengths_have_the_moments_of_what_was_drawn() -> None:
    rng = random.Random(0)
    drawn = [rng.lognormvariate(6.0, 0.8) for _ in range(200_000)]
    lengths = Lengths(6.0, 0.8)
    assert lengths.mean == pytest.approx(np.mean(drawn), rel=0.01)
    assert lengths.second == pytest.approx(np.mean(np.square(drawn)), rel=0.05)
    assert lengths.p95 == pytest.approx(np.quantile(drawn, 0.95), rel=0.02)
    kept, gone = lengths.cut_at(500)
    assert kept == pytest.approx(np.mean(np.minimum(drawn, 500)), rel=0.01)
    assert gone == pytest.approx(np.mean([max(0, 1 - 500 / d) for d in drawn]), rel=0.02)


def test_lossier_formats_hold_and_serve_more(model: EffectModel) -> None:
    effects = [predict(model, kv_format=kind) for kind in TUNABLES["kv_format"].values]
    for milder, lossier in itertools.pairwise(effects):
        assert lossier.kv_occupancy < milder.kv_occupancy
        assert lossier.most_rps > milder.most_rps
        assert lossier.quality > milder.quality


def test_more_load_is_never_better(model: EffectModel) -> None:
    effects = [predict(model, CHAT.at(rate)) for rate in (0.05, 0.2, 0.5, 0.8, 1.0, 1.5, 3.0, 10.0)]
    for less, more in itertools.pairwise(effects):
        assert more.kv_occupancy >= less.kv_occupancy - 1e-9
        assert more.ttft_s >= 0.99 * less.ttft_s
        assert more.goodput_share <= less.goodput_share + 1e-6


def test_a_large_budget_lengthens_gaps_and_a_small_one_first_tokens(model: EffectModel) -> None:
    busy = CHAT.at(0.8)
    small, large = (predict(model, busy, max_num_batched_tokens=budget) for budget in (128, 2048))
    assert small.tbt_s < large.tbt_s
    assert small.most_rps < predict(model, busy, max_num_batched_tokens=512).most_rps * 1.5
    assert predict(model, CHAT.at(0.05), max_num_batched_tokens=64).ttft_s > predict(model, CHAT.at(0.05)).ttft_s


def test_few_sequences_make_others_wait(model: EffectModel) -> None:
    assert predict(model, max_num_seqs=8).ttft_s > 3 * predict(model, kv_format="int8", max_num_seqs=128).ttft_s
    assert predict(model, max_num_seqs=8).running <= 8


def test_eviction_costs_what_it_drops(model: EffectModel) -> None:
    keeps = [predict(model, eviction="window", keep_tokens=keep) for keep in TUNABLES["keep_tokens"].values]
    assert all(less.dropped > more.dropped for less, more in itertools.pairwise(keeps))
    assert keeps[0].quality == pytest.approx(keeps[0].dropped * model.evicted_loss)


def test_what_is_in_hand_counts(model: EffectModel) -> None:
    crowd = Load(0.2, CHAT.prompt, CHAT.output, running=20, waiting=20, held_tokens=28_000)
    assert predict(model, crowd).ttft_s > 3 * predict(model, CHAT.at(0.2)).ttft_s


def test_capacity_comes_as_recoding_goes_on(model: EffectModel) -> None:
    full = Load(1.0, CHAT.prompt, CHAT.output, running=25, held_tokens=36_000)
    native, int4 = (places_of({**default_values(), "kv_format": kind}) for kind in ("native", "int4"))
    switching = model.effects(np.array([native, int4]), full, now=0).row(1)
    there = model.effects(np.array([int4]), Load(**{**vars(full), "lossy_share": 1.0}), now=0).row(0)
    assert switching.converge_s > 0 == there.converge_s
    assert switching.kv_occupancy > there.kv_occupancy
    assert switching.most_rps < there.most_rps


@pytest.mark.parametrize("seed", range(20))
def test_any_load_gives_finite_effects(model: EffectModel, seed: int) -> None:
    rng = random.Random(seed)
    load = Load(
        10 ** rng.uniform(-6, 4), Lengths(rng.uniform(0, 13.8), rng.uniform(0, 1.8)),
        Lengths(rng.uniform(0, 13.8), rng.uniform(0, 1.8)), rng.uniform(0, 0.99), 10 ** rng.uniform(-1, 4),
        10 ** rng.uniform(-1, 5), 10 ** rng.uniform(0, 9), rng.random(),
    )  # fmt: skip
    rows = Candidates().rows([rng.randrange(len(TUNABLES[knob].values)) for knob in KNOBS], KNOBS)
    for name, values in vars(model.effects(rows, load)).items():
        assert np.isfinite(values).all(), name
        assert (values >= 0).all(), name


def test_rows_do_not_depend_on_each_other(model: EffectModel) -> None:
    rows = Candidates().rows(places_of(default_values()), KNOBS)
    together = model.effects(rows, CHAT)
    for index in (0, 5, 100, len(rows) - 1):
        alone = model.effects(rows[[0, index]], CHAT).row(1)
        assert vars(together.row(index)) == pytest.approx(vars(alone))


def test_candidates_are_all_settings_up_to_two_moves_away() -> None:
    now = places_of({**default_values(), "eviction": "window"})
    rows = Candidates().rows(now, KNOBS)
    assert rows[0].tolist() == now
    found = {tuple(row) for row in rows.tolist()}
    assert len(found) == len(rows)
    assert {len(changes(now, row)) for row in rows} == {0, 1, 2}
    counts = [len(TUNABLES[knob].values) - 1 for knob in KNOBS]
    moves = sum(counts) + (sum(counts) ** 2 - sum(c * c for c in counts)) // 2
    dropped = counts[KNOBS.index("keep_tokens")]  # keep_tokens moved together with eviction switched off
    assert len(rows) == 1 + moves - dropped


def test_held_knobs_and_idle_keep_tokens_do_not_move() -> None:
    now = places_of(default_values())
    rows = Candidates().rows(now, [knob for knob in KNOBS if knob != "kv_format"])
    assert (rows[:, KNOBS.index("kv_format")] == now[0]).all()
    keeps = rows[rows[:, KNOBS.index("eviction")] == 0]
    assert (keeps[:, KNOBS.index("keep_tokens")] == now[KNOBS.index("keep_tokens")]).all()
    assert Candidates().rows(now, []).tolist() == [now]


def test_counting_noise_is_no_trend() -> None:
    assert forecast_rps(seen(offered_rps=1.2, offered_rps_long=1.0)) == pytest.approx(1.0)
    assert forecast_rps(seen(offered_rps=4.0, offered_rps_long=1.0)) > 4.0
    assert 0.1 < forecast_rps(seen(offered_rps=0.1, offered_rps_long=2.0)) < 2.0
    assert forecast_rps(seen(offered_rps=None, offered_rps_long=None)) == 0.0


def test_long_outputs_that_have_not_ended_are_not_missed() -> None:
    ended = load_of(seen(decode_tps=0.0))
    missed = load_of(seen(decode_tps=600.0, offered_rps=1.0, offered_rps_long=1.0))
    assert ended is not None
    assert missed is not None
    assert missed.output.mean > 2 * ended.output.mean


def test_while_requests_are_shut_out_tokens_count_per_request_that_ends() -> None:
    """Four run, sixty wait: what is generated belongs to those few, not to all that arrive."""
    values = {"offered_rps": 4.0, "offered_rps_long": 4.0, "decode_tps": 1200.0, "completed_rps": 2.0}
    let_in, shut_out = load_of(seen(**values, waiting=0.0)), load_of(seen(**values, waiting=60.0))
    assert let_in is not None
    assert shut_out is not None
    assert shut_out.output.mean == pytest.approx(2 * let_in.output.mean)
    assert not let_in.falls_behind(1.0)
    assert shut_out.falls_behind(1.0)
    assert not shut_out.falls_behind(60.0)  # in 30 s it is worked off


def test_before_any_request_has_ended_nobody_is_taken_for_endless() -> None:
    """A cold start under load: what is generated then is not all of one request."""
    unknown = {"output_tokens_p50": None, "output_tokens_p95": None}
    values = {"offered_rps": 4.0, "offered_rps_long": 4.0, "decode_tps": 1200.0, "waiting": 60.0, **unknown}
    found = load_of(seen(**values, completed_rps=0.0))
    assert found is not None
    assert found.output.mean == pytest.approx(300.0)
    assert found.falls_behind(1.0)
    known = load_of(seen(**{**values, "output_tokens_p50": 143.0, "output_tokens_p95": 600.0}, completed_rps=0.0))
    assert known is not None
    assert known.output.mean < 1000.0  # those that ended before tell, within bounds


def test_a_purse_pays_back() -> None:
    purse = Purse().after(1000, 0.0, 1)
    assert purse.affordable(0.005, 1000) == pytest.approx(0.01)
    assert purse.after(1000, 0.02, 1).affordable(0.005, 1000) == 0
    assert Purse.of({"tokens": math.nan, "loss": 1}) == Purse() == Purse.of(None)
    assert Purse(1e6, 0).after(0, 0, 1e5).tokens < 1


def test_the_guards_prediction_speaks_of_features_and_is_json(model: EffectModel) -> None:
    crowded = seen(offered_rps=1.0, offered_rps_long=1.0, running=25.0, tokens_per_sequence=1400.0, waiting=5.0)
    effect = predicted_effect(model, Change("kv_format", "int8"), crowded)
    assert effect is not None
    assert effect.after["kv_usage"] < effect.before["kv_usage"]
    assert effect.quality > 0
    assert effect.ready_s > 10
    assert json.loads(json.dumps(effect.to_json(), allow_nan=False))["change"] == ["kv_format", "int8"]
    assert "int8" in effect.why
    assert predicted_effect(model, Change("host_offload", "on"), crowded) is None
    assert predicted_effect(model, Change("kv_format", "fp8"), crowded) is None
    assert predicted_effect(model, Change("kv_format", "int8"), seen(prompt_tokens_p50=None)) is None


def test_the_engines_pool_counts_not_the_profiles(model: EffectModel, profile: Profile) -> None:
    """An engine may have been started with a pool of its own; what it tells goes into every prediction."""
    crowded = seen(offered_rps=0.3, offered_rps_long=0.3, running=6.0, tokens_per_sequence=1400.0)
    change = Change("kv_format", "int8")
    own, told, small = (
        predicted_effect(model, change, replace(crowded, pool_bytes=size))
        for size in (None, profile.pool_bytes, profile.pool_bytes // 4)
    )
    assert own == told
    assert own is not None
    assert small is not None
    assert small.before["kv_usage"] > 2 * own.before["kv_usage"]
    assert model.for_pool(1) is model
    other = EffectModel(
        profile.groups(), profile.pool_bytes // 4, profile.latency_model(), literature_quality(), model.targets
    )
    rebuilt = predicted_effect(other, change, crowded)
    assert rebuilt is not None
    for name, value in rebuilt.before.items():
        assert small.before[name] == pytest.approx(value), name


def test_predictions_order_settings_as_the_simulator_does(profile: Profile) -> None:
    """A few cells of the bench: enough to notice that a term was lost."""
    guessed, simulated = [], []
    choices: list[dict[str, TunableValue]] = [{}, {"kv_format": "int4"}, {"max_num_batched_tokens": 2048}]
    for values in choices:
        for rate in (0.3, 0.9):
            _, known, figures = measure(profile, "chat-steady", rate, values, 30.0, seed=3)
            guessed.append(known)
            simulated.append(figures)
    for name in ("tbt_s", "kv_occupancy", "running"):
        ranks = spearman([getattr(one, name) for one in guessed], [one[name] for one in simulated])
        assert ranks > 0.7, name
    errors = sorted(abs(g.running - s["running"]) / s["running"] for g, s in zip(guessed, simulated, strict=True))
    assert errors[len(errors) // 2] < 0.35


@pytest.mark.parametrize("values", [{}, {"max_num_batched_tokens": 128}])
def test_prompts_that_take_most_of_the_time_make_everybody_wait(values: dict[str, TunableValue]) -> None:
    """A processor computes prompts slowly and tokens fast: others' prompts are most of what a sequence waits for."""
    bundled = read_profile(PROFILES / "bundled_cpu.yaml")
    rate = 0.6 * native_rps(bundled, "chat-steady")
    _, known, figures = measure(bundled, "chat-steady", rate, values, 60.0, seed=4)
    assert known.most_rps > rate
    assert known.running == pytest.approx(figures["running"], rel=0.4)
    assert known.ttft_s == pytest.approx(figures["ttft_s"], rel=0.5)


def test_a_queue_does_not_save_up_idle_time() -> None:
    """Prompts wait for each other long before they keep a server busy, however long one looks ahead."""
    bundled = read_profile(PROFILES / "bundled_cpu.yaml")
    model, most = effect_model_of(bundled, Targets(2.0, 0.25)), native_rps(bundled, "chat-steady")
    row = np.array([places_of(default_values())])
    light, half = (known_load("chat-steady", share * most) for share in (0.1, 0.6))
    for horizon_s in (10.0, 60.0):
        waits = [model.effects(row, load, horizon_s=horizon_s).row(0).ttft_s for load in (light, half)]
        assert waits[1] > 1.4 * waits[0]


def test_a_pool_that_is_kept_full_is_predicted_full(profile: Profile) -> None:
    """Quantised blocks strand no more than a few slabs of it."""
    values: dict[str, TunableValue] = {"kv_format": "int8", "block_size": 32, "max_num_batched_tokens": 2048}
    _, known, figures = measure(profile, "chat-steady", 1.6, {**values, "max_num_seqs": 256}, 40.0, seed=3)
    assert figures["kv_occupancy"] > 0.85
    assert known.kv_occupancy == pytest.approx(figures["kv_occupancy"], abs=0.08)


def test_the_known_load_is_the_workloads_own() -> None:
    load = known_load("chat-steady", 2.0)
    assert load.rate_rps == 2.0
    assert load.prompt.mean == pytest.approx(1290, rel=0.05)


def test_the_bundled_profiles_are_there() -> None:
    assert len(list(Path(PROFILES).glob("*.yaml"))) >= 2
