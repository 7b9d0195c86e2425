"""Which setting is wanted, given what each would do: one situation at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.tunables import TUNABLES, default_values
from envs.signals import Targets
from policies.effects import KNOBS, Effects, places_of
from policies.load import Lengths, Load
from policies.predictor_choice import STEADY, PredictorConfig, Situation, Wish, choose

TARGETS = Targets(2.0, 0.2)
CONFIG = PredictorConfig()
_KNOB = {"budget": KNOBS.index("max_num_batched_tokens"), "seqs": KNOBS.index("max_num_seqs")}


def wished(*settings: dict[str, float], rate_rps: float = 1.0, peak_rps: float = 3.0) -> Wish:
    """By settings: ``budget`` and ``seqs`` (the default's place, moved by so many), and their effects."""
    now = places_of(default_values())
    rows = np.array([now] * len(settings))
    for row, setting in zip(rows, settings, strict=True):
        for name, column in _KNOB.items():
            row[column] += int(setting.get(name, 0))
            assert 0 <= row[column] < len(TUNABLES[KNOBS[column]].values)
    usual = {
        "kv_occupancy": 0.3, "running": 5.0, "ttft_s": 1.0, "tbt_s": 0.1, "most_rps": 2.0, "goodput_share": 0.5,
        "quality": 0.0, "dropped": 0.0, "converge_s": 0.0,
    }  # fmt: skip
    effects: Any = {name: np.array([one.get(name, value) for one in settings]) for name, value in usual.items()}
    load = Load(rate_rps, Lengths.of(800, 3000) or Lengths(0, 0), Lengths.of(100, 400) or Lengths(0, 0))
    allowed = np.ones(len(settings), dtype=bool)
    return choose(Situation(now, rows, Effects(**effects), load, allowed, peak_rps, rate_rps), TARGETS, CONFIG)


def test_what_meets_the_targets_is_not_left_for_what_serves_less() -> None:
    """Near the target of first tokens; a larger step would serve them sooner, but fewer requests."""
    here, larger = {"ttft_s": 1.85}, {"budget": 1, "ttft_s": 1.4, "most_rps": 1.8}
    assert wished(here, larger) == Wish(STEADY, 0)
    assert wished(here, {**larger, "most_rps": 2.5}) == Wish("ahead", 1)


def test_ahead_of_peaks_nothing_moves_nearer_to_the_targets_than_it_should() -> None:
    here, smaller = {}, {"budget": -1, "ttft_s": 1.75, "most_rps": 2.6}
    assert wished(here, smaller) == Wish(STEADY, 0)
    assert wished(here, {**smaller, "ttft_s": 1.4}) == Wish("ahead", 1)
    assert wished({"ttft_s": 1.78}, smaller) == Wish("ahead", 1), "no nearer than it is"


def test_of_alike_settings_the_one_with_room_for_more_sequences_is_taken() -> None:
    missed = {"ttft_s": 9.0, "goodput_share": 0.2, "most_rps": 0.9}
    few, many = ({"seqs": places, "goodput_share": 0.6 + 0.001 * (places < 0)} for places in (-4, 1))
    assert wished(missed, few, many) == Wish("targets-missed", 2)
    assert wished(missed, many, few) == Wish("targets-missed", 1)
    assert wished(missed, few) == Wish("targets-missed", 1)
