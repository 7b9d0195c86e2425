"""What the predictor remembers from tick to tick, as plain JSON values: made, checked, and brought up to date. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from engine.tunables import TUNABLES
from envs.spaces import Observation
from envs.window import number
from policies.base import PolicyState
from policies.effects import KNOBS
from policies.predictor_choice import STEADY, PredictorConfig
from policies.quality_purse import Purse

_LONGEST_GAP_S: Final = 60.0  # a longer silence between two ticks says nothing about what was in between


def fresh_state() -> PolicyState:
    """``stamp_ns`` of the last observation; ``lengths`` last seen; ``purse`` of the quality budget; ``peak_rps`` and
    ``usual_rps`` of arrivals (None before the first); ``want`` (the scenario that has been wanted) and ``want_s`` (for
    how long); ``plan`` (changes still to be made), ``asked`` (the change proposed last) and ``asked_s`` (since when);
    ``moved`` (seconds since a knob took what was asked, for a while), ``set_at`` (by knob, rate and logarithms of
    median lengths when it was ``asked_at``); ``refused`` (by knob, a value that was not taken and for how long it is
    not asked for); ``time_scale_log`` (of what measured gaps make of the profile's step times).
    """
    return {
        "stamp_ns": None, "lengths": None, "purse": Purse().to_json(), "want": STEADY, "want_s": 0.0,
        "peak_rps": 0.0, "usual_rps": None, "plan": [], "asked": None, "asked_s": 0.0, "asked_at": None,
        "moved": {}, "set_at": {}, "refused": {}, "time_scale_log": 0.0,
    }  # fmt: skip


def brought_to(observation: Observation, state: PolicyState, config: PredictorConfig) -> tuple[PolicyState, float]:
    """A fresh copy of the state at the observation's time, with what was seen to move or not to, and the seconds since
    the last one (0 after too long a gap).
    """
    old = state if is_usable(state) else fresh_state()
    passed_ns = 0 if old["stamp_ns"] is None else observation.stamp_ns - old["stamp_ns"]
    passed_s = passed_ns / 1e9
    if not 0 <= passed_s <= _LONGEST_GAP_S:
        passed_s = 0.0
    values = observation.tunables
    moved = {knob: s + passed_s for knob, s in old["moved"].items() if s + passed_s < config.stay_s}
    refused = {knob: [value, left - passed_s] for knob, (value, left) in old["refused"].items() if left > passed_s}
    set_at = old["set_at"]
    asked, asked_s = old["asked"], old["asked_s"] + passed_s
    plan = [step for step in old["plan"] if values.get(step[0]) != step[1]]
    if asked is not None and values.get(asked[0]) == asked[1]:
        moved[asked[0]] = 0.0
        set_at = {**set_at, asked[0]: old["asked_at"]}
        asked, asked_s = None, 0.0
    elif asked is not None and asked_s > config.patience_s:
        refused[asked[0]] = [asked[1], config.refused_s]
        asked, asked_s, plan = None, 0.0, []
    return {
        **old, "stamp_ns": observation.stamp_ns, "moved": moved, "set_at": set_at, "refused": refused,
        "asked": asked, "asked_s": asked_s, "plan": plan,
    }, passed_s  # fmt: skip


def is_usable(state: Mapping[str, Any]) -> bool:
    """Whether a restored state has this version's shape; anything else is replaced by a fresh one."""
    stamp_ns, lengths, plan, asked = (state.get(name) for name in ("stamp_ns", "lengths", "plan", "asked"))
    refused, set_at = state.get("refused"), state.get("set_at")
    if not isinstance(set_at, dict) or "asked_at" not in state:
        return False
    places = [at for at in (*set_at.values(), state["asked_at"]) if at is not None]
    if not set(set_at) <= set(KNOBS) or not all(map(_is_place, places)):
        return False
    numbers = [number(state.get(name)) for name in ("want_s", "asked_s")]
    if not (stamp_ns is None or isinstance(stamp_ns, int)) or None in numbers or not isinstance(state.get("want"), str):
        return False
    moved = state.get("moved")
    if "purse" not in state or "peak_rps" not in state or "usual_rps" not in state or not isinstance(plan, list):
        return False
    if not (isinstance(refused, dict) and isinstance(moved, dict)):
        return False
    if not all(knob in KNOBS and number(seconds) is not None for knob, seconds in moved.items()):
        return False
    if not all(
        knob in KNOBS and isinstance(entry, list) and len(entry) == 2 and entry[0] in TUNABLES[knob].values
        and number(entry[1]) is not None
        for knob, entry in refused.items()
    ):  # fmt: skip
        return False
    steps = (*plan, *([] if asked is None else [asked]))
    steps_fit = all(
        isinstance(step, list) and len(step) == 2 and step[0] in KNOBS and step[1] in TUNABLES[step[0]].values
        for step in steps
    )
    return steps_fit and (lengths is None or _are_lengths(lengths))


def _is_place(at: object) -> bool:
    return isinstance(at, list) and len(at) == 3 and None not in map(number, at)


def _are_lengths(lengths: object) -> bool:
    return (
        isinstance(lengths, list)
        and len(lengths) == 2
        and all(isinstance(pair, list) and len(pair) == 2 and None not in map(number, pair) for pair in lengths)
    )
