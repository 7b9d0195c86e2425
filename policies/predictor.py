"""The cheapest setting that is predicted to meet the targets: a policy out of a profile and queueing arithmetic.

At every tick the load that the windows show, and a short forecast of it, is put to :class:`policies.effects.
EffectModel` for the setting in force and for all that are one or two moves away. A setting that misses a target, or
costs more quality than the budget has left, is left for the cheapest one that meets them (quality loss first, then the
number and the time of changes); where none does, for the one with most requests inside the targets. Milder settings
than needed are gone back to only when the need has been away for a while, with room to spare.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from engine.tunables import TUNABLES
from envs.signals import FORMAT_NAMES
from envs.spaces import Observation
from envs.window import number
from policies.base import Change, Decision, PolicyState
from policies.candidates import Candidates, changes
from policies.effects import KNOBS, EffectModel, Effects, Places
from policies.load import Lengths, Load, forecast_rps, load_of
from policies.quality_purse import Purse

STEADY: Final = "steady"
_READY: Final = 0.9  # of the targets, by prediction, is near enough to act at no cost
_CAREFUL: Final = 0.85  # of the budget: what is spent is estimated, and quantised KV goes on costing for a while
_BACKLOG: Final = 0.2  # weight of being able to serve all that arrives, beside being in time
_LONGEST_GAP_S: Final = 60.0
_SAME: Final = 2e-4  # relative losses of quality nearer than this are the same


@dataclass(frozen=True)
class PredictorConfig:
    """``quality_budget``: mean relative loss per token. ``act_after_s``: for how long a target must be missed by
    prediction before anything moves, ``release_after_s``: for how long it must have been met by a milder setting with
    ``spare`` to spare, ``settle_s``: how long a finished change is left alone, ``patience_s``: how long a change is asked
    for before it counts as refused, which it does for ``refused_s``. ``gain``: by how much of
    arrivals a change must raise what is inside the targets, twice that for one which draws upon the budget. ``hold_s``: how long a lossy setting must be affordable.
    ``stay_s``: how long a knob that was moved is left alone, a format that becomes lossier apart.
    ``peak_fade_s``: time constant in which a peak of arrivals is forgotten by the way back to milder settings.
    """

    quality_budget: float = 0.005
    act_after_s: float = 1.0
    release_after_s: float = 30.0
    settle_s: float = 5.0
    patience_s: float = 12.0
    refused_s: float = 60.0
    spare: float = 0.25
    gain: float = 0.05
    stay_s: float = 45.0
    hold_s: float = 20.0
    peak_fade_s: float = 120.0


@dataclass(frozen=True)
class _Wish:
    """Where to go and why. ``kind``: the scenario."""

    kind: str
    row: int


class PredictorPolicy:
    """A :class:`policies.base.Policy` over an :class:`policies.effects.EffectModel`.

    State: ``stamp_ns`` of the last observation; ``lengths`` last seen; the ``purse`` of the quality budget; ``want`` (the
    scenario that has been wanted) and ``want_s`` (for how long); ``plan`` (changes still to be made), ``asked`` (the
    change proposed last) and ``asked_s`` (since when); ``moved`` (seconds since a knob moved, by knob, for a while);
    ``refused`` (by knob, a value that was not taken and for how long it is not asked for).
    """

    def __init__(self, model: EffectModel, config: PredictorConfig | None = None, *, name: str = "predictor") -> None:
        self.model = model
        self.config = config or PredictorConfig()
        self._name = name
        self._candidates = Candidates()

    @property
    def name(self) -> str:
        return self._name

    def initial_state(self) -> PolicyState:
        return {
            "stamp_ns": None, "lengths": None, "purse": Purse().to_json(), "values": {}, "want": STEADY, "want_s": 0.0,
            "peak_rps": 0.0, "plan": [], "asked": None, "asked_s": 0.0, "moved": {}, "refused": {},
        }  # fmt: skip

    def decide(self, observation: Observation, state: PolicyState) -> tuple[Decision, PolicyState]:
        new = self._passed(observation, state)
        passed_s = new.pop("passed_s")
        if observation.instance is None:
            return self._idle("the engine cannot be reached; nothing is known", new)
        if any(knob not in observation.tunables for knob in KNOBS):
            return self._idle("the engine does not say where all of its knobs are", new)
        now = [TUNABLES[knob].values.index(observation.tunables[knob]) for knob in KNOBS]
        load, new = self._load(observation, new)
        if load is None:
            return self._idle("arrivals or their lengths are not known yet; nothing is predicted", new)
        movable = [knob for knob in KNOBS if knob not in observation.held]
        rows = self._candidates.rows(now, movable)
        effects = self.model.effects(rows, load)
        new = self._pay(observation, effects, new, passed_s)
        new["peak_rps"] = self._peak(load, new, passed_s)
        allowed = self._allowed(now, rows, effects, load, new)
        wish = self._wish(now, rows, effects, load, allowed, new["peak_rps"])
        new["want_s"] = new["want_s"] + passed_s if wish.kind == new["want"] else 0.0
        new["want"] = wish.kind
        change, kind, new = self._next(now, rows, effects, wish, new, movable, allowed)
        return self._decision(now, rows, effects, load, wish, change, kind), new

    # -- state --------------------------------------------------------------------------------------------------------

    def _passed(self, observation: Observation, state: PolicyState) -> dict[str, Any]:
        """The state brought to the observation's time: what was seen to move, what was refused."""
        old = state if _is_usable(state) else self.initial_state()
        passed_ns = 0 if old["stamp_ns"] is None else observation.stamp_ns - old["stamp_ns"]
        passed_s = passed_ns / 1e9
        if not 0 <= passed_s <= _LONGEST_GAP_S:
            passed_s = 0.0
        values = {knob: observation.tunables[knob] for knob in KNOBS if knob in observation.tunables}
        moved = {knob: s + passed_s for knob, s in old["moved"].items() if s + passed_s < self.config.stay_s}
        moved |= {knob: 0.0 for knob, value in values.items() if old["values"].get(knob, value) != value}
        refused = {knob: [value, left - passed_s] for knob, (value, left) in old["refused"].items() if left > passed_s}
        asked, asked_s = old["asked"], old["asked_s"] + passed_s
        plan = [step for step in old["plan"] if values.get(step[0]) != step[1]]
        if asked is not None and values.get(asked[0]) == asked[1]:
            asked, asked_s = None, 0.0
        elif asked is not None and asked_s > self.config.patience_s:
            refused[asked[0]] = [asked[1], self.config.refused_s]
            asked, asked_s, plan = None, 0.0, []
        return {
            **old, "stamp_ns": observation.stamp_ns, "values": values, "moved": moved, "refused": refused,
            "asked": asked, "asked_s": asked_s, "plan": plan, "passed_s": passed_s,
        }  # fmt: skip

    @staticmethod
    def _idle(why: str, state: PolicyState) -> tuple[Decision, PolicyState]:
        return Decision(None, STEADY, why), {**state, "want": STEADY, "want_s": 0.0, "plan": [], "asked": None}

    @staticmethod
    def _load(observation: Observation, state: PolicyState) -> tuple[Load | None, PolicyState]:
        """The load to be ready for. An idle engine's lengths are those seen last."""
        load = load_of(observation)
        if load is None:
            rate = number(observation.values.get("offered_rps_long"))
            in_hand = [number(observation.values.get(name)) for name in ("running", "waiting")]
            if state["lengths"] is None or rate is None or rate > 0.1 or any(in_hand):
                return None, state
            prompt, output = (Lengths(*pair) for pair in state["lengths"])
            load = Load(rate, prompt, output)
        lengths = [[one.mu, one.sigma] for one in (load.prompt, load.output)]
        return load.at(forecast_rps(observation)), {**state, "lengths": lengths}

    def _peak(self, load: Load, state: PolicyState, passed_s: float) -> float:
        """The highest rate of late, fading: load that came once comes again."""
        faded = number(state["peak_rps"]) or 0.0
        return max(load.rate_rps, faded * math.exp(-passed_s / self.config.peak_fade_s))

    def _pay(self, observation: Observation, effects: Effects, state: PolicyState, passed_s: float) -> PolicyState:
        tokens = passed_s * max(0.0, number(observation.values.get("decode_tps")) or 0.0)
        shares = [number(observation.values.get(f"bytes_share_{name}")) or 0.0 for name in FORMAT_NAMES]
        dropped = float(effects.dropped[0])
        loss = self.model.stored_loss(shares) * (1 - dropped) + dropped * self.model.evicted_loss
        return {**state, "purse": Purse.of(state["purse"]).after(tokens, loss, passed_s).to_json()}

    # -- what would be best -------------------------------------------------------------------------------------------

    def _allowed(
        self, now: Sequence[int], rows: Places, effects: Effects, load: Load, state: PolicyState
    ) -> NDArray[np.bool_]:
        """Rows inside the quality budget and not refused lately. The setting in force may spend to the last."""
        purse, config = Purse.of(state["purse"]), self.config
        budget = config.quality_budget * _CAREFUL
        ahead = load.rate_rps * load.output.mean
        # What is stored lossy goes on costing until those who attend it have ended.
        stays_s = load.output.mean * float(effects.tbt_s[0])
        most = purse.affordable(budget, ahead * (config.hold_s + stays_s))
        # Half the budget may always be spent: it still pays back what was spent too much.
        allowed: NDArray[np.bool_] = effects.quality <= max(most, config.quality_budget / 2) + _SAME
        most_here = max(purse.affordable(budget, ahead * stays_s), config.quality_budget / 2)
        allowed[0] = effects.quality[0] <= most_here + _SAME
        for column, knob in enumerate(KNOBS):
            if knob in state["moved"] and effects.tbt_s[0] <= self.model.targets.tbt_s:
                stays = rows[:, column] == now[column]
                allowed &= stays | (rows[:, column] > now[column]) if knob == "kv_format" else stays
        for knob, (value, _) in state["refused"].items():
            column = KNOBS.index(knob)
            place = TUNABLES[knob].values.index(value)
            if place != now[column]:
                allowed &= rows[:, column] != place
        return allowed

    def _wish(
        self, now: Sequence[int], rows: Places, effects: Effects, load: Load, allowed: NDArray[np.bool_], peak_rps: float
    ) -> _Wish:
        targets, config, quality = self.model.targets, self.config, effects.quality
        strain = np.maximum(effects.ttft_s / targets.ttft_s, effects.tbt_s / targets.tbt_s)
        copes = effects.most_rps >= load.rate_rps
        # What the budget can bear for ever is free: it is taken before it is needed, up to the latest peak.
        free = allowed & (quality <= config.quality_budget)
        ready = free & (strain <= _READY) & (effects.most_rps >= np.maximum(peak_rps, load.rate_rps))
        roomy = allowed & (strain <= 1 - config.spare) & (effects.most_rps >= peak_rps * (1 + config.spare))
        if allowed[0] and strain[0] <= 1 and copes[0]:
            milder = roomy & (quality < quality[0] - _SAME)
            if milder.any():
                return _Wish("milder", self._cheapest(milder, effects, rows, now))
            # The most that free settings can serve inside the targets, as far as the latest peak wants it.
            fine = free & (strain <= _READY)
            most = float(np.where(fine, effects.most_rps, 0.0).max())
            enough = fine & (effects.most_rps >= min(peak_rps, most / (1 + 3 * config.gain)))
            if enough[0] or not enough.any():
                return _Wish(STEADY, 0)
            return _Wish("ahead", self._cheapest(enough, effects, rows, now))
        # Beyond goodput, what can be served counts: it works off the backlog.
        score = effects.goodput_share + _BACKLOG * np.minimum(1.0, effects.most_rps / load.rate_rps)
        score = np.where(allowed, score, -1.0)
        # Settings that the budget can bear for ever are free; others are drawn upon if they bring clearly more.
        bound = (score[0] if allowed[0] else 0.0) + config.gain
        paid_bound = max(bound, float(np.where(free, score, -1.0).max()) + 2 * config.gain)
        worth = allowed & np.where(free, score >= bound, score >= paid_bound)
        if not worth.any():
            if allowed[0] or not allowed.any():
                return _Wish(STEADY, 0)
            worth = allowed
        for fitting in (worth & roomy, worth & ready, worth & (strain <= 1) & copes):
            if fitting.any():
                kind = "targets-missed" if allowed[0] else "budget-spent"
                return _Wish(kind, self._cheapest(fitting, effects, rows, now))
        best = float(score[worth].max())
        near = worth & (score >= best - config.gain / 2)
        return _Wish("best-effort" if allowed[0] else "budget-spent", self._cheapest(near, effects, rows, now))

    @staticmethod
    def _cheapest(among: NDArray[np.bool_], effects: Effects, rows: Places, now: Sequence[int]) -> int:
        """Least quality loss, then fewest moves, then soonest converged, then most goodput."""
        chosen = np.flatnonzero(among)
        moves = (rows[chosen] != np.array(now)).sum(axis=1)
        quality = np.round(effects.quality[chosen] / _SAME)
        order = np.lexsort(
            (-effects.goodput_share[chosen], np.round(effects.converge_s[chosen], 1), moves, quality)
        )
        return int(chosen[order[0]])

    # -- what to do about it ------------------------------------------------------------------------------------------

    def _next(
        self, now: Sequence[int], rows: Places, effects: Effects, wish: _Wish, state: PolicyState, movable: Sequence[str],
        allowed: NDArray[np.bool_],
    ) -> tuple[Change | None, str, PolicyState]:
        config = self.config
        plan = [Change(knob, value) for knob, value in state["plan"] if knob in movable]
        if plan and wish.kind != STEADY:
            return self._ask(plan[0], plan, wish.kind, state)
        if wish.kind == STEADY:
            return None, STEADY, {**state, "plan": [], "asked": None, "asked_s": 0.0}
        wait_s = config.release_after_s if wish.kind == "milder" else config.act_after_s
        settled = min(state["moved"].values(), default=config.settle_s) >= config.settle_s
        if state["want_s"] < wait_s or not settled:
            return None, wish.kind, {**state, "plan": []}
        steps = changes(now, rows[wish.row])
        if len(steps) == 2:
            steps.sort(key=lambda step: -self._alone(step, now, rows, effects, allowed))
        return self._ask(steps[0], steps, wish.kind, state)

    @staticmethod
    def _ask(change: Change, plan: Sequence[Change], kind: str, state: PolicyState) -> tuple[Change, str, PolicyState]:
        asked = [change.knob, change.value]
        asked_s = state["asked_s"] if state["asked"] == asked else 0.0
        steps = [[step.knob, step.value] for step in plan]
        return change, kind, {**state, "plan": steps, "asked": asked, "asked_s": asked_s}

    @staticmethod
    def _alone(
        step: Change, now: Sequence[int], rows: Places, effects: Effects, allowed: NDArray[np.bool_]
    ) -> float:
        """How good it is to make this one of two changes first: its goodput share. What eviction keeps comes before
        eviction, and what is not allowed by itself comes last.
        """
        if step.knob == "keep_tokens":
            return math.inf
        column = KNOBS.index(step.knob)
        between = np.array(now)
        between[column] = TUNABLES[step.knob].values.index(step.value)
        found = np.flatnonzero((rows == between).all(axis=1))
        return float(effects.goodput_share[found[0]]) if len(found) and allowed[found[0]] else -1.0

    def _decision(
        self, now: Sequence[int], rows: Places, effects: Effects, load: Load, wish: _Wish, change: Change | None,
        kind: str,
    ) -> Decision:  # fmt: skip
        here = self._told(effects, 0)
        if change is None:
            waits = "" if wish.kind == STEADY else f"; {wish.kind}, not for long enough yet"
            return Decision(None, STEADY, f"at {load.rate_rps:.2f} requests/s as it is: {here}{waits}")
        there = ", ".join(map(str, changes(now, rows[wish.row]))) or "the same"
        text = f"{kind} at {load.rate_rps:.2f} requests/s: {here}; with {there}: {self._told(effects, wish.row)}"
        return Decision(change, kind, text)

    def _told(self, effects: Effects, row: int) -> str:
        targets = self.model.targets
        return (
            f"TTFT {effects.ttft_s[row]:.2f} of {targets.ttft_s:g} s, TBT {1e3 * effects.tbt_s[row]:.0f} of "
            f"{1e3 * targets.tbt_s:g} ms, KV {effects.kv_occupancy[row]:.0%}, loss {effects.quality[row]:.2%}, "
            f"up to {effects.most_rps[row]:.2f} requests/s"
        )


def _is_usable(state: Mapping[str, Any]) -> bool:
    """Whether a restored state has this version's shape; anything else is replaced by a fresh one."""
    stamp_ns, lengths, plan, asked = (state.get(name) for name in ("stamp_ns", "lengths", "plan", "asked"))
    refused, values = state.get("refused"), state.get("values")
    numbers = [number(state.get(name)) for name in ("want_s", "asked_s")]
    if not (stamp_ns is None or isinstance(stamp_ns, int)) or None in numbers or not isinstance(state.get("want"), str):
        return False
    moved = state.get("moved")
    if "purse" not in state or "peak_rps" not in state or not isinstance(plan, list):
        return False
    if not all(isinstance(part, dict) for part in (refused, values, moved)):
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


def _are_lengths(lengths: object) -> bool:
    return (
        isinstance(lengths, list)
        and len(lengths) == 2
        and all(isinstance(pair, list) and len(pair) == 2 and None not in map(number, pair) for pair in lengths)
    )


def with_budget(config: PredictorConfig, budget: float) -> PredictorConfig:
    """The same with another quality budget. Raises ValueError for a negative one."""
    if not budget >= 0:
        raise ValueError(f"a quality budget is a mean relative loss >= 0, got {budget}")
    return replace(config, quality_budget=budget)
