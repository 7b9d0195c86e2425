"""The cheapest setting that is predicted to meet the targets: a policy out of a profile and queueing arithmetic.

At every tick the load that the windows show, and a short forecast of it, is put to :class:`policies.effects.
EffectModel` for the setting in force and for all that are one or two moves away. A setting that misses a target, or
costs more quality than the budget has left, is left for the cheapest one that meets them (quality loss first, then the
number and the time of changes); where none does, for the one with most requests inside the targets. Milder settings
than needed are gone back to only when the need has been away for a while, with room to spare.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine.tunables import TUNABLES
from envs.signals import FORMAT_NAMES
from envs.spaces import Observation
from envs.window import number
from policies.base import Change, Decision, PolicyState
from policies.candidates import Candidates, changes
from policies.correction import learnt, time_scale
from policies.effects import KNOBS, EffectModel, Effects, Places, SettingTable
from policies.load import Lengths, Load, forecast_rps, load_of
from policies.predictor_choice import SAME_LOSS, STEADY, URGENT, PredictorConfig, Situation, Wish, choose
from policies.predictor_state import brought_to, fresh_state
from policies.quality_purse import Purse

_OTHER_LENGTHS: Final = 0.9  # of logarithms: medians that differ by a factor of 2.5 are another load
_SHARES: Final = tuple(f"bytes_share_{name}" for name in FORMAT_NAMES)
# Too low, they shut out what the engine could serve, which nobody waits for: up they may go as soon as that shows.
_THROTTLES: Final = frozenset({"max_num_batched_tokens", "max_num_seqs"})
_WORTH_TELLING: Final = 0.1  # of the logarithm of a factor
_CAREFUL: Final = 0.85  # of the budget: what is spent is estimated, and quantised KV goes on costing for a while


@dataclass(frozen=True)
class Reach:
    """``rows``: int64 [settings, knobs], the one in force first; their ``table``; bool [knobs, settings]: ``stays``,
    whether a knob is where it is, and ``larger``, whether it goes up (a format: becomes lossier).
    """

    rows: Places
    table: SettingTable
    stays: NDArray[np.bool_]
    larger: NDArray[np.bool_]


class PredictorPolicy:
    """A :class:`policies.base.Policy` over an :class:`policies.effects.EffectModel`.

    State: see :func:`policies.predictor_state.fresh_state`.
    """

    def __init__(self, model: EffectModel, config: PredictorConfig | None = None, *, name: str = "predictor") -> None:
        self.model = model
        self.config = config or PredictorConfig()
        self._name = name
        self._candidates = Candidates()
        self._reached: tuple[object, Reach] | None = None  # at the last tick; spares work, decides nothing

    @property
    def name(self) -> str:
        return self._name

    def initial_state(self) -> PolicyState:
        return fresh_state()

    def decide(self, observation: Observation, state: PolicyState) -> tuple[Decision, PolicyState]:
        new, passed_s = brought_to(observation, state, self.config)
        if observation.instance is None:
            return self._idle("the engine cannot be reached; nothing is known", new)
        if any(knob not in observation.tunables for knob in KNOBS):
            return self._idle("the engine does not say where all of its knobs are", new)
        now = [TUNABLES[knob].values.index(observation.tunables[knob]) for knob in KNOBS]
        load, new = self._load(observation, new)
        if load is None:
            return self._idle("arrivals or their lengths are not known yet; nothing is predicted", new)
        movable = [knob for knob in KNOBS if knob not in observation.held]
        model = self.model.for_pool(observation.pool_bytes)
        reach = self._in_reach(model, now, movable)
        scale = time_scale(new.get("time_scale_log"))
        effects = model.effects(reach.table, load, time_scale=scale)
        new = self._learn(observation, effects, new, passed_s)
        new = self._pay(observation, effects, new, passed_s)
        new = self._rates(load, new, passed_s)
        allowed = self._allowed(reach, effects, load, new)
        here = Situation(now, reach.rows, effects, load, allowed, new["peak_rps"], new["usual_rps"])
        wish = choose(here, self.model.targets, self.config)
        same = wish.kind == new["want"] or {wish.kind, new["want"]} <= URGENT
        new["want_s"] = new["want_s"] + passed_s if same else 0.0
        new["want"] = wish.kind
        change, new = self._next(here, wish, new, movable)
        return self._decision(here, wish, change, scale), new

    def _in_reach(self, model: EffectModel, now: Sequence[int], movable: Sequence[str]) -> Reach:
        """The settings in reach: the same for as long as no knob moves."""
        where = (model, tuple(now), tuple(movable))
        if self._reached is None or self._reached[0] != where:
            rows = self._candidates.rows(now, movable)
            self._reached = where, Reach(rows, model.table(rows), (rows == rows[0]).T, (rows > rows[0]).T)
        return self._reached[1]

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

    def _rates(self, load: Load, state: PolicyState, passed_s: float) -> PolicyState:
        """The highest rate of late, fading (load that came once comes again), and the usual one."""
        rate, config = load.rate_rps, self.config
        peak, usual = number(state["peak_rps"]) or 0.0, number(state["usual_rps"])
        peak = max(rate, peak * math.exp(-passed_s / config.peak_fade_s))
        keep = math.exp(-passed_s / config.usual_s)
        return {**state, "peak_rps": peak, "usual_rps": rate if usual is None else keep * usual + (1 - keep) * rate}

    def _pay(self, observation: Observation, effects: Effects, state: PolicyState, passed_s: float) -> PolicyState:
        tokens = passed_s * min(1e7, max(0.0, number(observation.values.get("decode_tps")) or 0.0))
        shares = [min(1.0, max(0.0, number(observation.values.get(name)) or 0.0)) for name in _SHARES]
        dropped = float(effects.dropped[0])
        loss = self.model.stored_loss(shares) * (1 - dropped) + dropped * self.model.evicted_loss
        return {**state, "purse": Purse.of(state["purse"]).after(tokens, loss, passed_s).to_json()}

    def _learn(self, observation: Observation, effects: Effects, state: PolicyState, passed_s: float) -> PolicyState:
        """Correct the profile's step times by measured gaps, where these are of the setting in force."""
        config = self.config
        if config.learn_s == 0 or min(state["moved"].values(), default=math.inf) < config.still_s:
            return state
        measured_s, share = number(observation.values.get("tbt_tail_s")), 1 - math.exp(-passed_s / config.learn_s)
        log = learnt(state.get("time_scale_log"), measured_s, float(effects.tbt_s[0]), share)
        return {**state, "time_scale_log": log}

    # -- what would be best -------------------------------------------------------------------------------------------

    def _allowed(self, reach: Reach, effects: Effects, load: Load, state: PolicyState) -> NDArray[np.bool_]:
        """Rows inside the quality budget and not refused lately. The setting in force may spend to the last."""
        purse, config = Purse.of(state["purse"]), self.config
        budget = config.quality_budget * _CAREFUL
        ahead = load.rate_rps * load.output.mean
        # What is stored lossy goes on costing until those who attend it have ended.
        stays_s = load.output.mean * float(effects.tbt_s[0])
        most = purse.affordable(budget, ahead * (config.hold_s + stays_s))
        # Half the budget may always be spent: it still pays back what was spent too much.
        allowed: NDArray[np.bool_] = effects.quality <= max(most, config.quality_budget / 2) + SAME_LOSS
        most_here = max(purse.affordable(budget, ahead * stays_s), config.quality_budget / 2)
        allowed[0] = effects.quality[0] <= most_here + SAME_LOSS
        place, behind = _place(load), load.falls_behind(self.model.targets.ttft_s)
        for column, knob in enumerate(KNOBS):
            # Whoever has moved stays while the load is what it was then: else noise would move it to and fro.
            stays = reach.stays[column]
            if knob == "kv_format" or (knob in _THROTTLES and behind):
                stays = stays | reach.larger[column]
            if _is_same_load(state["set_at"].get(knob), place):
                if knob != "kv_format" or effects.quality[0] <= config.quality_budget:
                    allowed &= stays
            elif knob in state["moved"] and effects.tbt_s[0] <= self.model.targets.tbt_s:
                allowed &= stays
        for knob, (value, _) in state["refused"].items():
            column = KNOBS.index(knob)
            refused = TUNABLES[knob].values.index(value)
            if refused != reach.rows[0, column]:
                allowed &= reach.rows[:, column] != refused
        return allowed

    # -- what to do about it ------------------------------------------------------------------------------------------

    def _next(
        self, here: Situation, wish: Wish, state: PolicyState, movable: Sequence[str]
    ) -> tuple[Change | None, PolicyState]:
        config = self.config
        if wish.kind == STEADY:
            return None, {**state, "plan": [], "asked": None, "asked_s": 0.0}
        plan = [Change(knob, value) for knob, value in state["plan"] if knob in movable]
        if plan:
            return self._ask(plan, state)
        wait_s = config.release_after_s if wish.kind == "milder" else config.act_after_s
        settled = min(state["moved"].values(), default=config.settle_s) >= config.settle_s
        if state["want_s"] < wait_s or not settled:
            return None, {**state, "plan": []}
        steps = changes(here.now, here.rows[wish.row])
        state = {**state, "asked_at": _place(here.load)}
        return self._ask(sorted(steps, key=lambda step: -_alone(step, here)), state)

    @staticmethod
    def _ask(plan: Sequence[Change], state: PolicyState) -> tuple[Change, PolicyState]:
        asked = [plan[0].knob, plan[0].value]
        asked_s = state["asked_s"] if state["asked"] == asked else 0.0
        steps = [[step.knob, step.value] for step in plan]
        return plan[0], {**state, "plan": steps, "asked": asked, "asked_s": asked_s}

    def _decision(self, here: Situation, wish: Wish, change: Change | None, scale: float) -> Decision:
        rate, told = f"at {here.load.rate_rps:.2f} requests/s", self._told(here.effects, 0)
        if abs(math.log(scale)) > _WORTH_TELLING:
            rate += f", steps {scale:.2f} times the profile's"
        if change is None:
            waits = "" if wish.kind == STEADY else f"; {wish.kind}, not for long enough yet"
            return Decision(None, STEADY, f"{rate} as it is: {told}{waits}")
        there = ", ".join(map(str, changes(here.now, here.rows[wish.row]))) or "the same"
        text = f"{wish.kind} {rate}: {told}; with {there}: {self._told(here.effects, wish.row)}"
        return Decision(change, wish.kind, text)

    def _told(self, effects: Effects, row: int) -> str:
        targets = self.model.targets
        return (
            f"TTFT {effects.ttft_s[row]:.2f} of {targets.ttft_s:g} s, TBT {1e3 * effects.tbt_s[row]:.0f} of "
            f"{1e3 * targets.tbt_s:g} ms, KV {effects.kv_occupancy[row]:.0%}, loss {effects.quality[row]:.2%}, "
            f"up to {effects.most_rps[row]:.2f} requests/s"
        )


def _place(load: Load) -> list[float]:
    """What kind of load it is: rate, and logarithms of median lengths."""
    return [load.rate_rps, load.prompt.mu, load.output.mu]


def _is_same_load(then: Sequence[float] | None, now: Sequence[float]) -> bool:
    return (
        then is not None
        and 0.5 * then[0] <= now[0] <= 2 * then[0]
        and abs(then[1] - now[1]) <= _OTHER_LENGTHS
        and abs(then[2] - now[2]) <= _OTHER_LENGTHS
    )


def _alone(step: Change, here: Situation) -> float:
    """How good it is to make this one of two changes first: its goodput share. What eviction keeps comes before
    eviction, and what is not allowed by itself comes last.
    """
    if step.knob == "keep_tokens":
        return math.inf
    between = np.array(here.now)
    between[KNOBS.index(step.knob)] = TUNABLES[step.knob].values.index(step.value)
    found = np.flatnonzero((here.rows == between).all(axis=1))
    return float(here.effects.goodput_share[found[0]]) if len(found) and here.allowed[found[0]] else -1.0
