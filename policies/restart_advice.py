"""Whether a restart with other KV settings would be worth its price, for engines that fix them at their start.

Arithmetic on what was watched, nothing simulated: all savings and costs are estimates and are called so. Pressure is
time in which memory was what requests waited for: the pool (or every slot) full with requests waiting, or requests
preempted. A lossier format holds more by the ratio of bits; what would have fitted then, would not have waited. Time
over target without such pressure is nobody's reason to restart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from engine.tunables import Tunable, TunableValue
from envs.port import Change
from envs.reward import literature_quality
from envs.window import ratio
from policies.restart_looks import Evidence, Look, evidence_of
from policies.usual_budget import USUAL_BUDGET

_WORTH_A_LOOK: Final = 0.05  # share of the time watched
_ENOUGH: Final = 0.8  # of the pressure gone: a still lossier format would not be worth its loss


@dataclass(frozen=True)
class Storage:
    """What a value of a format knob means: ``bits`` per element, scales included, and the format of ours that is as
    lossy by published figures.
    """

    bits: float
    like: str


@dataclass(frozen=True)
class Settings:
    """The knobs of an engine: declared, and in force as far as known. ``kv_knobs`` are moved together; ``slot_knob`` is
    empty where memory is not set aside by request.
    """

    tunables: Mapping[str, Tunable]
    effective: Mapping[str, TunableValue]
    storage: Mapping[str, Storage]
    kv_knobs: tuple[str, ...]
    slot_knob: str = ""


@dataclass(frozen=True)
class Terms:
    """``quality_budget``: relative loss per token that may be bought (None: any). ``restart_s``: time without service;
    ``is_restart_measured``: on this engine, else somebody's guess. ``payback_s``: within which a restart must earn what
    it costs. ``least_s``: less watching decides nothing.
    """

    quality_budget: float | None = USUAL_BUDGET
    restart_s: float = 60.0
    is_restart_measured: bool = False
    payback_s: float = 3600.0
    least_s: float = 30.0


@dataclass(frozen=True)
class Saving:
    """Estimated, over the time watched. ``over_s`` None: the engine tells no latency."""

    preemptions: float | None
    over_s: float | None
    pressed_s: float
    loss_per_token: float


@dataclass(frozen=True)
class RestartCost:
    """Estimated. ``requests``: that come while nobody serves; None where arrivals are unknown."""

    seconds: float
    is_measured: bool
    requests: float | None


@dataclass(frozen=True)
class Advice:
    """``changes``: to be made in one restart, none for leaving all as it is. ``payback_s``: after so long under such
    load the restart has saved what it cost, None for never. ``is_worth``: soon enough.
    """

    scenario: str
    reason: str
    evidence: Evidence
    changes: tuple[Change, ...] = ()
    saving: Saving | None = None
    cost: RestartCost | None = None
    payback_s: float | None = None
    is_worth: bool = False
    assumed: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        found = asdict(self)
        found["changes"] = [[change.knob, change.value] for change in self.changes]
        found["assumed"] = list(self.assumed)
        return found


def advise(looks: Sequence[Look], settings: Settings, terms: Terms) -> Advice:
    """What to do about what was seen. Abstains, saying why, where it cannot tell."""
    seen = evidence_of(looks)
    if seen.watched_s < terms.least_s:
        return Advice("watching", f"{seen.watched_s:.0f} s watched, less than {terms.least_s:g} s tell nothing", seen)
    if seen.peak_share is None:
        return Advice("unknown-memory", "the engine does not tell how full its memory is", seen)
    worth_a_look_s = _WORTH_A_LOOK * seen.watched_s
    if seen.pressed_s < worth_a_look_s:
        over = f"over target for {seen.over_s:.0f} s, but " if seen.over_s else ""
        name = "not-memory" if seen.over_s and seen.over_s >= worth_a_look_s else "steady"
        reason = (
            f"{over}memory was short for {seen.pressed_s:.0f} of {seen.watched_s:.0f} s: KV settings would not help"
        )
        return Advice(name, reason, seen)
    unknown = [knob for knob in (*settings.kv_knobs, settings.slot_knob) if knob and knob not in settings.effective]
    if unknown:
        reason = f"memory was short for {seen.pressed_s:.0f} s, but the engine does not tell its {', '.join(unknown)}"
        return Advice("unknown-settings", reason, seen)
    options = [_weighed(value, looks, seen, settings, terms) for value in _lossier(settings, terms)]
    found = [option for option in options if option is not None]
    if not found:
        reason = f"memory was short for {seen.pressed_s:.0f} s; no lossier format is left that the quality budget bears"
        return Advice("no-format-left", reason, seen)
    relieved = [option for option in found if option.saving and option.saving.pressed_s >= _ENOUGH * seen.pressed_s]
    return relieved[0] if relieved else max(found, key=lambda option: option.saving.pressed_s if option.saving else 0.0)


def _lossier(settings: Settings, terms: Terms) -> list[TunableValue]:
    """Values of the format knobs that take less memory than the largest in force and may be lost, mildest first."""
    losses = literature_quality().by_format
    now = max(settings.storage[str(settings.effective[knob])].bits for knob in settings.kv_knobs)
    found: dict[float, TunableValue] = {}
    for value in settings.tunables[settings.kv_knobs[0]].values:
        kind = settings.storage[str(value)]
        borne = terms.quality_budget is None or losses[kind.like] <= terms.quality_budget
        if kind.bits < now and borne:
            found.setdefault(kind.bits, value)
    return [found[bits] for bits in sorted(found, reverse=True)]


def _weighed(
    value: TunableValue, looks: Sequence[Look], seen: Evidence, settings: Settings, terms: Terms
) -> Advice | None:
    """The advice to use a format, None where it makes no room."""
    bits = [settings.storage[str(settings.effective[knob])].bits for knob in settings.kv_knobs]
    kind = settings.storage[str(value)]
    factor = sum(bits) / len(bits) / kind.bits
    changes = [Change(knob, value) for knob in settings.kv_knobs if settings.effective[knob] != value]
    if settings.slot_knob:
        slots = int(settings.effective[settings.slot_knob])
        allowed = [int(number) for number in settings.tunables[settings.slot_knob].values]
        more = max((number for number in allowed if number <= slots * factor), default=slots)
        if more <= slots:
            return None
        changes.append(Change(settings.slot_knob, more))
        factor = more / slots
    eased = [look for look in looks if look.is_pressed and look.demand is not None and look.demand <= factor]
    pressed_s = sum(look.seconds for look in eased)
    over_s = None if seen.over_s is None else sum(look.seconds for look in eased if look.is_over)
    preempted = None if seen.preemptions is None else sum(look.preemptions or 0.0 for look in eased)
    saving = Saving(preempted, over_s, pressed_s, literature_quality().by_format[kind.like])
    requests = None if seen.rps is None else seen.rps * terms.restart_s
    cost = RestartCost(terms.restart_s, terms.is_restart_measured, requests)
    gained_s = pressed_s if over_s is None else over_s
    payback_s = ratio(terms.restart_s * seen.watched_s, gained_s)
    is_worth = payback_s is not None and payback_s <= terms.payback_s
    what = ", ".join(map(str, changes))
    reason = (
        f"memory was short for {seen.pressed_s:.0f} of {seen.watched_s:.0f} s; with {what} it holds {factor:.2f} times "
        f"as much, which {pressed_s:.0f} s of that would have fitted into"
    )
    assumed = [
        f"{sum(bits) / len(bits):g} bits per element are stored now and {kind.bits:g} then, and nothing else changes",
        "every waiting request would hold as much as a running one",
        f"a token loses {saving.loss_per_token:.2%}, by published figures",
    ]
    assumed += [] if terms.is_restart_measured else [f"a restart takes {terms.restart_s:g} s"]
    assumed += ["time that requests waited for memory counts as time over target"] if over_s is None else []
    return Advice("memory-short", reason, seen, tuple(changes), saving, cost, payback_s, is_worth, tuple(assumed))
