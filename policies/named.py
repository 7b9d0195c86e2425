"""Policies by name: what a person writes on a command line, made into something that can be played."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

from engine.text import one_line
from engine.tunables import TunableValue, parse_change
from envs.profile import Profile
from envs.signals import Targets
from policies.base import Policy
from policies.play import Contender
from policies.rules import RuleError, load_rules, presets
from policies.threshold import ThresholdPolicy
from policies.usual_budget import USUAL_BUDGET


@dataclass(frozen=True)
class World:
    """What a policy may be built for: the profile of the engine (None: unknown), the targets, and the relative loss
    per token that is allowed on average.
    """

    profile: Profile | None = None
    targets: Targets = field(default_factory=Targets)
    quality_budget: float = USUAL_BUDGET


def contender(text: str, world: World | None = None) -> Contender:
    """A policy by its name. Raises ValueError, one line.

    ``none``; ``static:KNOB=VALUE,...``; ``predictor``; ``learned:FOLDER`` (without a limit on time, so that simulations
    can be repeated); ``auto``, the best of these for the profile by what was measured on it; the name of a preset; a
    rules file. ``unbudgeted:NAME`` is another one that the guard holds to no quality budget; a preset of somebody
    else's rules is run so anyway, to be compared as it is.
    """
    kind, _, rest = text.partition(":")
    if kind in KINDS:
        return KINDS[kind](text, rest, world or World())
    try:
        return Contender(text, ThresholdPolicy(load_rules(text)), budgeted=is_budgeted(text))
    except RuleError as error:
        known, is_missing = ", ".join((KNOWN, *presets())), isinstance(error.__cause__, FileNotFoundError)
        missing = one_line(f"{text}: no such rules file, nor a policy; known: {known}")
        raise ValueError(missing if is_missing else "; ".join(error.problems)) from error


def is_budgeted(text: str) -> bool:
    """Whether the guard holds a contender of this name to a quality budget; what never changes has no guard."""
    return not (text.startswith((UNBUDGETED, "static:")) or text in {"none", *_AS_PUBLISHED})


def read_from(text: str) -> list[Path]:
    """Files that a policy of this name would be read from, whether they are there or not; none for most kinds."""
    text = text.removeprefix(UNBUDGETED)
    kind, _, rest = text.partition(":")
    if kind == "learned":
        from policies.card import CARD_FILE, WEIGHTS_FILE  # noqa: PLC0415

        return [Path(rest) / name for name in (CARD_FILE, WEIGHTS_FILE)]
    return [] if kind in KINDS or text in presets() else [Path(text)]


def bundled() -> tuple[str, ...]:
    """What is compared when nobody says: the presets, and every kind that needs no more than its name."""
    return (*presets(), *(kind for kind in KINDS if kind in NEED_NOTHING))


def static_name(values: Mapping[str, TunableValue]) -> str:
    """The name of a static setting: ``none`` when nothing differs from the defaults."""
    return f"static:{','.join(f'{knob}={value}' for knob, value in values.items())}" if values else "none"


def _unbudgeted(text: str, rest: str, world: World) -> Contender:
    if not rest or rest.startswith(UNBUDGETED):
        raise ValueError(f"{text!r}: write {UNBUDGETED}NAME, a policy's name")
    return replace(contender(rest, world), name=text, budgeted=False)


def _none(text: str, rest: str, _: World) -> Contender:
    if rest:
        raise ValueError(f"{text!r}: write none, without anything behind it")
    return Contender("none")


def _static(text: str, rest: str, _: World) -> Contender:
    values: dict[str, TunableValue] = {}
    for part in rest.split(","):
        knob, equals, value = (item.strip() for item in part.partition("="))
        if not equals:
            raise ValueError(f"{text!r}: write static:KNOB=VALUE,KNOB=VALUE")
        if knob in values:
            raise ValueError(f"{text!r}: {knob} is given twice")
        values[knob] = parse_change(knob, value)
    return Contender(text, values=values)


def _predictor(text: str, rest: str, world: World) -> Contender:
    if rest:
        raise ValueError(f"{text!r}: write predictor, without anything behind it")
    return Contender("predictor", _predictor_for(world))


def _predictor_for(world: World) -> Policy:
    """Raises ValueError without a profile, and for a pool that is too small for the model."""
    from policies.predictor_of import predictor_of  # noqa: PLC0415

    if world.profile is None:
        raise ValueError("predictor: it calculates with the engine's profile; name one")
    return predictor_of(world.profile, world.targets)


def _learned(text: str, rest: str, world: World) -> Contender:
    from policies.advisor import advisors  # noqa: PLC0415
    from policies.card import PolicyFileError  # noqa: PLC0415
    from policies.learned import load_learned  # noqa: PLC0415

    if not rest:
        raise ValueError(f"{text!r}: write learned:FOLDER, as autotune export made it")
    digest = None if world.profile is None else world.profile.digest
    predictor = None if world.profile is None else partial(_predictor_for, world)
    rules = ThresholdPolicy(load_rules("default"))
    try:
        policy = load_learned(Path(rest), fallback=rules, advisor=advisors(predictor), profile_digest=digest)
    except PolicyFileError as error:
        raise ValueError(f"{text}: {error}") from error
    return Contender(text, policy)


def _auto(text: str, rest: str, world: World) -> Contender:
    from policies.auto import BUNDLED, choose  # noqa: PLC0415

    if rest:
        raise ValueError(f"{text!r}: write auto, without anything behind it")
    rules = ThresholdPolicy(load_rules("default"))
    digest = None if world.profile is None else world.profile.digest
    chosen = choose(
        BUNDLED,
        rules,
        profile_digest=digest,
        quality_budget=world.quality_budget,
        predictor=lambda: _predictor_for(world),
    )
    return Contender("auto", chosen)


KNOWN: Final = "none, static:KNOB=VALUE,..., predictor, learned:FOLDER, auto, unbudgeted:NAME"
"""How every kind of :data:`KINDS` is written."""
NEED_NOTHING: Final = ("predictor",)
UNBUDGETED: Final = "unbudgeted:"
_AS_PUBLISHED: Final = ("literature",)

# One line per kind of policy; imports of heavy ones belong into their function.
KINDS: Final[Mapping[str, Callable[[str, str, World], Contender]]] = {
    "none": _none,
    "static": _static,
    "predictor": _predictor,
    "learned": _learned,
    "unbudgeted": _unbudgeted,
    "auto": _auto,
}
