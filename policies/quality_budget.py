"""A quality budget that holds whatever a policy proposes: part of the guard, which wraps every policy everywhere.

Every generated token earns the budget and pays the loss at which it was generated (:mod:`policies.quality_purse`). A
setting that loses less than half the budget is free. Any other is let in once enough is saved for a while of it and
for all that runs to end under it, and is handed back when what is saved would just pay for what runs. So the mean loss
stays inside the budget, but for what a single tick brings that nobody could see: requests that arrive within it, or
outputs longer than the 95th percentile of late. Whether a long mean or a fading one is meant makes no difference: where
no fading mean was ever above the budget, no mean from the beginning is.

Losses are the profile's figures, or published ones, weighted by what the engine holds. What a measured profile has no
figure for is refused. Of a format that is refused, :mod:`policies.quality_ladder` finds the part of the way that is
not. Knobs that an operator holds are left alone, and what they cost is paid for by all others.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from engine.tunables import TUNABLES, TunableValue
from envs.port import Change
from envs.reward import Charge
from envs.spaces import Observation
from envs.window import number
from policies.quality_purse import Purse

QualityState = dict[str, Any]
"""JSON-able, part of the guard's; see :meth:`QualityBudget.initial_state`."""

_SINKS: Final = 16  # tokens that eviction keeps besides keep_tokens
_ALL: Final = 1.0  # what a setting without a figure is taken to lose
_SURPRISE: Final = 2.0  # times the tokens of the last interval: what may come before the next look
_MOST_TPS: Final = 1e7  # a counter that grew faster is broken


class _Setting(NamedTuple):
    """How KV is stored and dropped."""

    kv_format: TunableValue
    eviction: TunableValue
    keep_tokens: TunableValue


QUALITY_KNOBS: Final = _Setting._fields
"""The knobs that the budget is about."""


@dataclass(frozen=True)
class Losses:
    """Relative loss of a token whose whole context is stored in a format, or dropped in a way; a value that is missing
    has not been measured. ``estimated``: published figures, nothing of this model.
    """

    by_format: Mapping[str, float]
    by_eviction: Mapping[str, float]
    estimated: bool = False

    def of_format(self, value: TunableValue) -> float | None:
        return 0.0 if value == TUNABLES["kv_format"].default else self.by_format.get(str(value))

    def of_eviction(self, value: TunableValue) -> float | None:
        return 0.0 if value == TUNABLES["eviction"].default else self.by_eviction.get(str(value))


@dataclass(frozen=True)
class QualityBudget:
    """``budget``: mean relative loss per generated token. Raises ValueError for a negative one.

    ``hold_s``: for how long a setting that costs more must be affordable before it is let in. ``rest_s``: for how long
    nobody may have asked for what was handed back before it is let in again, since a need that lasts cannot be met from
    savings and would come and go with them. ``free``: share of the budget that may always be lost. ``careful``: share
    of it that is spent, as resident KV tells no more than roughly what each token attends.
    """

    budget: float
    losses: Losses
    hold_s: float = 20.0
    rest_s: float = 120.0
    free: float = 0.5
    careful: float = 0.9

    def __post_init__(self) -> None:
        if not self.budget >= 0:
            raise ValueError(f"a quality budget is a mean relative loss >= 0, got {self.budget}")

    @staticmethod
    def initial_state() -> QualityState:
        """``purse``; ``stamp_ns`` of the last look; ``loss_now`` per token and ``tokens`` of the last interval;
        ``spent``: by knob that was handed back, when it was last asked for.
        """
        return {"purse": Purse().to_json(), "stamp_ns": None, "loss_now": 0.0, "tokens": 0.0, "spent": {}}

    def brought_to(self, observation: Observation, charge: Charge | None, state: QualityState) -> QualityState:
        """The state at the time of an observation, with what was generated since the last one paid for.

        A loss that the readings do not tell is taken to be the larger of the last one and what the settings can cost.
        """
        old, now_ns = state if _is_usable(state) else self.initial_state(), observation.stamp_ns
        if old["stamp_ns"] == now_ns:
            return old
        seconds = 0.0 if old["stamp_ns"] is None else max(0.0, (now_ns - old["stamp_ns"]) / 1e9)
        charge = charge or Charge()
        tokens = min(_MOST_TPS * seconds, max(0.0, charge.tokens or 0.0))
        loss = charge.loss
        if loss is None:
            loss = max(old["loss_now"], self._most(_setting(observation), observation))
        purse = Purse.of(old["purse"]).after(tokens, loss, seconds)
        rest_ns = self.rest_s * 1e9
        spent = {knob: at_ns for knob, at_ns in old["spent"].items() if 0 <= now_ns - at_ns < rest_ns}
        return {"purse": purse.to_json(), "stamp_ns": now_ns, "loss_now": loss, "tokens": tokens, "spent": spent}

    def objection(self, change: Change, observation: Observation, state: QualityState) -> str | None:
        """Why a change may overdraw the budget, in one line with the figures, or None if it cannot."""
        now = _setting(observation)
        if change.knob not in QUALITY_KNOBS:
            return None
        if now is None:
            return "the engine does not say how it stores and drops KV, so nobody knows what it loses"
        then = now._replace(**{change.knob: change.value})
        most = self._most(then, observation)
        if not self._is_lossier(change.knob, now, then) or most <= self.free * self.budget:
            return None
        if self._is_unmeasured(then):
            is_kept = self.losses.of_eviction(then.eviction) is not None
            what = f"kv_format {then.kv_format}" if is_kept else f"eviction {then.eviction}"
            return (
                f"the profile has no figure for what {what} loses; with a quality budget of {self.budget:.2%} that is "
                "refused (measure it with autotune compare-formats)"
            )
        says = f"up to {most:.2%} of loss per token{' (estimated, published)' if self.losses.estimated else ''}"
        says += f", the budget is {self.budget:.2%}"
        if change.knob in state["spent"]:
            return f"{says}; handed back, and wanted ever since: savings are for peaks, not for a need that lasts"
        saved, above = self._saved(state), most - self.careful * self.budget
        if above <= 0:
            return None if saved >= 0 else f"{says}; {-saved:.3g} tokens' worth is overdrawn"
        ahead = self._ahead(observation, hold_s=self.hold_s)
        if ahead is None:
            idle = number(observation.values.get("running")) == 0
            why = "nothing runs" if idle else "what runs and how long its outputs get is not known yet"
            return f"{says}; {why}, so nobody knows how much would be spent"
        if saved >= above * ahead:
            return None
        return f"{says}; what is saved pays for {max(0.0, saved / above):.0f} tokens of it, {ahead:.0f} are ahead"

    def hand_back(
        self, observation: Observation, movable: Mapping[str, Collection[TunableValue]], state: QualityState
    ) -> list[tuple[Change, str]]:
        """Changes that end an overdraft, the costliest knob's first, each with why; none while the purse is sound.

        ``movable``: the values that each knob may be set to.
        """
        now, limit, loss = _setting(observation), self.careful * self.budget, state["loss_now"]
        if now is None or loss <= limit:
            return []
        ahead, saved = self._ahead(observation), self._saved(state)
        if ahead is not None and saved >= (loss - limit) * (ahead + _SURPRISE * state["tokens"]):
            return []
        running = "of unknown length" if ahead is None else f"{ahead:.0f} tokens"
        purse = Purse.of(state["purse"])
        mean = purse.loss / purse.tokens if purse.tokens else 0.0
        why = (
            f"quality budget: {mean:.3%} per token lost so far of {self.budget:.3%}, now {loss:.2%}, "
            f"and what runs still has {running} to come"
        )
        candidates = []
        dropping, default = self.losses.of_eviction(now.eviction), TUNABLES["eviction"].default
        if now.eviction != default and default in movable.get("eviction", ()):
            candidates.append((_ALL if dropping is None else dropping, Change("eviction", default)))
        storing = self.losses.of_format(now.kv_format)
        target = self._milder(now.kv_format, movable.get("kv_format", ()))
        if target is not None and (storing is None or storing > self.free * self.budget):
            candidates.append((_ALL if storing is None else storing, Change("kv_format", target)))
        candidates.sort(key=lambda one: -one[0])
        return [(change, f"{change.knob} {observation.tunables[change.knob]} -> {change.value}: {why}")
                for _, change in candidates]  # fmt: skip

    @staticmethod
    def asked_for(knob: str, observation: Observation, state: QualityState, *, handed_back: bool) -> QualityState:
        """The state after a knob was handed back, or was asked for in vain after that."""
        if not handed_back and knob not in state["spent"]:
            return state
        return {**state, "spent": {**state["spent"], knob: observation.stamp_ns}}

    def _saved(self, state: QualityState) -> float:
        purse = Purse.of(state["purse"])
        return self.careful * self.budget * purse.tokens - purse.loss

    def _most(self, setting: _Setting | None, observation: Observation) -> float:
        """The largest loss per token that a setting can come to, at the lengths of late."""
        if setting is None:
            return 0.0
        stored, dropped = self.losses.of_format(setting.kv_format), self.losses.of_eviction(setting.eviction)
        stored = _ALL if stored is None else stored
        if setting.eviction == TUNABLES["eviction"].default:
            return stored
        lengths = [number(observation.values.get(name)) for name in ("prompt_tokens_p95", "output_tokens_p95")]
        known = [length for length in lengths if length is not None]
        share = (
            max(0.0, 1 - (int(setting.keep_tokens) + _SINKS) / max(1.0, sum(known)))
            if len(known) == len(lengths)
            else 1.0
        )
        return max(stored, (1 - share) * stored + share * (_ALL if dropped is None else dropped))

    def _is_lossier(self, knob: str, now: _Setting, then: _Setting) -> bool:
        """Whether the knob that moves costs more by itself: a way back is always open."""
        if knob == "keep_tokens":
            return then.eviction != TUNABLES["eviction"].default and int(then.keep_tokens) < int(now.keep_tokens)
        if knob == "kv_format":
            before, after = self.losses.of_format(now.kv_format), self.losses.of_format(then.kv_format)
        else:
            before, after = self.losses.of_eviction(now.eviction), self.losses.of_eviction(then.eviction)
        return (_ALL if after is None else after) > (_ALL if before is None else before) or after is None

    def _is_unmeasured(self, setting: _Setting) -> bool:
        return None in {self.losses.of_format(setting.kv_format), self.losses.of_eviction(setting.eviction)}

    def _milder(self, kv_format: TunableValue, allowed: Collection[TunableValue]) -> TunableValue | None:
        """The lossiest format before this one that is free for ever."""
        values = TUNABLES["kv_format"].values
        free = [
            value for value in values[: values.index(kv_format)]
            if value in allowed and (loss := self.losses.of_format(value)) is not None
            and loss <= self.free * self.budget
        ]  # fmt: skip
        return free[-1] if free else None

    @staticmethod
    def _ahead(observation: Observation, hold_s: float = 0.0) -> float | None:
        """Tokens that what runs will generate at most, and what is generated in a time; None where unknown. With a time
        asked for, an idle engine is unknown: what comes next is.
        """
        running, longest, rate = (
            number(observation.values.get(name)) for name in ("running", "output_tokens_p95", "decode_tps")
        )
        if running is None or (longest is None and running > 0):
            return None
        if hold_s and (not running or rate is None):
            return None
        return running * (longest or 0.0) + hold_s * (rate or 0.0)


def _setting(observation: Observation) -> _Setting | None:
    known = observation.tunables
    return _Setting(*(known[knob] for knob in QUALITY_KNOBS)) if all(knob in known for knob in QUALITY_KNOBS) else None


def _is_usable(state: Mapping[str, Any]) -> bool:
    """Whether a restored state has this version's shape; anything else is replaced by a fresh one."""
    stamp_ns, spent = state.get("stamp_ns", ""), state.get("spent")
    numbers = [number(state.get(name)) for name in ("loss_now", "tokens")]
    return (
        isinstance(stamp_ns, int | None)
        and all(value is not None and 0 <= value < math.inf for value in numbers)
        and isinstance(spent, dict)
        and all(isinstance(at_ns, int) for at_ns in spent.values())
    )
