"""Rules that cannot do what they are meant to do: found by reasoning about their conditions, without running them.

Kinds of findings:

    unreachable   the condition is true nowhere inside the figures' bounds
    shadowed      wherever the rule can be active, more important ones set every one of its knobs
    stuck         the release condition is true nowhere: once active, always active
    gap           where no rule can be active, a knob that rules move has no ``otherwise`` to go to
    flapping      trigger and release touch, and neither waits: noise on the boundary switches back and forth
    pair          two flapping rules meet on one boundary and want different values of one knob
    self-undoing  the action lowers the very figure that asked for it, below where the rule lets go
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from engine.tunables import TunableValue
from policies.regions import Box, Span, describe, touches, where
from policies.rules import Rule, RuleSet

LONG_ENOUGH_S: Final = 5.0  # for: and release_for: together; noise rarely stays on one side for so long

# Figures that fall when KV is stored smaller. ``load`` is the larger of usage and concurrency.
SHRINKING: Final = ("kv_usage", "load", "bandwidth_share")
# What is left of them, about: by format as declared in envs.signals, of eviction at a few thousand tokens a sequence.
_LEFT: Final[Mapping[tuple[str, TunableValue], float]] = {
    ("kv_format", "int8"): 0.55,
    ("kv_format", "k8v4"): 0.43,
    ("kv_format", "int4"): 0.3,
    ("eviction", "window"): 0.5,
    ("eviction", "heavy_hitter"): 0.5,
}
# A knob that means nothing while another is at this value: leaving it where it is does no harm.
_IDLE_WITH: Final[Mapping[str, tuple[str, TunableValue]]] = {"keep_tokens": ("eviction", "none")}


@dataclass(frozen=True)
class Finding:
    """``kind``: see the module. ``rules``: their names. ``text``: one line for a person."""

    kind: str
    rules: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def lint(rules: RuleSet) -> list[Finding]:
    """Everything found, rule by rule and then between rules. Raises ValueError for a condition with too many cases."""
    alive = [rule for rule in rules.rules if where(rule.when.text)]
    return [
        *_unreachable(rules),
        *_stuck(alive),
        *_shadowed(alive),
        *_gaps(rules, alive),
        *(finding for rule in alive if (finding := _flapping(rule)) is not None),
        *_pairs(alive),
        *(finding for rule in alive if (finding := _self_undoing(rule)) is not None),
    ]


def _unreachable(rules: RuleSet) -> Iterator[Finding]:
    for rule in rules.rules:
        if not where(rule.when.text):
            yield Finding("unreachable", (rule.name,), f"{rule.name}: {rule.when.text!r} is never true")


def _stuck(rules: Sequence[Rule]) -> Iterator[Finding]:
    for rule in rules:
        if rule.release is not None and not where(rule.release.text):
            yield Finding("stuck", (rule.name,), f"{rule.name}: its release {rule.release.text!r} is never true")


def _shadowed(rules: Sequence[Rule]) -> Iterator[Finding]:
    for place, rule in enumerate(rules):
        above = [other for other in rules[:place] if other.for_s <= rule.for_s]
        if all(_covered(rule, [other for other in above if knob in dict(other.sets)]) for knob, _ in rule.sets):
            knobs = {knob for knob, _ in rule.sets}
            by = [other.name for other in above if knobs & {knob for knob, _ in other.sets}]
            text = f"{rule.name}: whenever it is active, {', '.join(by)} set what it sets"
            yield Finding("shadowed", (rule.name, *by), text)


def _covered(rule: Rule, others: Sequence[Rule]) -> bool:
    """Whether one of the others is active (for sure) wherever a rule can be."""
    boxes = [*where(rule.when.text), *(where(rule.release.text, holds=False) if rule.release else [])]
    for other in others:
        boxes = where(other.when.text, holds=False, within=boxes)
    return not boxes


def _gaps(rules: RuleSet, alive: Sequence[Rule]) -> Iterator[Finding]:
    moved = dict.fromkeys(knob for rule in alive for knob, _ in rule.sets)
    for knob in moved:
        if knob in dict(rules.otherwise) or _is_idle_elsewhere(knob, alive):
            continue
        movers = [rule for rule in alive if knob in dict(rule.sets)]
        boxes = where("1 > 0")
        for rule in movers:
            boxes = where(rule.when.text, holds=False, within=boxes)
            if rule.release is not None:
                boxes = where(rule.release.text, within=boxes)
        if boxes:
            text = f"{knob}: no rule says where it belongs at {describe(boxes[0])}, and otherwise has no {knob}"
            yield Finding("gap", tuple(rule.name for rule in movers), text)


def _is_idle_elsewhere(knob: str, rules: Sequence[Rule]) -> bool:
    """Whether whoever moves the knob also moves the one without which it means nothing."""
    if knob not in _IDLE_WITH:
        return False
    partner, _ = _IDLE_WITH[knob]
    return all(partner in dict(rule.sets) for rule in rules if knob in dict(rule.sets))


def _leaves(rule: Rule) -> list[Box]:
    """Where an active rule lets go."""
    return where(rule.when.text, holds=False) if rule.release is None else where(rule.release.text)


def _flaps(rule: Rule) -> bool:
    if rule.for_s + rule.release_for_s >= LONG_ENOUGH_S:
        return False
    leaves = _leaves(rule)
    return any(touches(enters, leave) for enters in where(rule.when.text) for leave in leaves)


def _flapping(rule: Rule) -> Finding | None:
    if not _flaps(rule):
        return None
    release = "no release" if rule.release is None else f"released at {rule.release.text!r}"
    waits = f"{rule.for_s + rule.release_for_s:g} s of waiting in all"
    text = f"{rule.name}: hysteresis of zero width, {rule.when.text!r} with {release} and {waits}"
    return Finding("flapping", (rule.name,), text)


def _pairs(rules: Sequence[Rule]) -> Iterator[Finding]:
    flapping = [rule for rule in rules if _flaps(rule)]
    for one, other in combinations(flapping, 2):
        knobs = [knob for knob, value in one.sets if dict(other.sets).get(knob, value) != value]
        if knobs and any(touches(a, b) for a in where(one.when.text) for b in where(other.when.text)):
            text = f"{one.name} and {other.name} meet where either may win, and want different {', '.join(knobs)}"
            yield Finding("pair", (one.name, other.name), text)


def _self_undoing(rule: Rule) -> Finding | None:
    left = 1.0
    for knob, value in rule.sets:
        left *= _LEFT.get((knob, value), 1.0)
    if left == 1.0:
        return None
    for box in where(rule.when.text):
        for figure in SHRINKING:
            span = box[figure]
            if figure not in rule.when.names or not isinstance(span, Span) or span.low <= 0:
                continue
            # Just inside the trigger, and what is left of it once the action has taken hold.
            after = {**box, figure: Span(span.low * left, span.low * left)}
            gone = (
                where(rule.when.text, holds=False, within=[after])
                if rule.release is None
                else where(rule.release.text, within=[after])
            )
            if gone:
                what = ", ".join(f"{knob} {value}" for knob, value in rule.sets if (knob, value) in _LEFT)
                text = (
                    f"{rule.name}: {what} takes {figure} from {span.low:g} to about {span.low * left:.2g}, where the "
                    "rule lets go; a figure such as kv_demand does not depend on how KV is stored"
                )
                return Finding("self-undoing", (rule.name,), text)
    return None
