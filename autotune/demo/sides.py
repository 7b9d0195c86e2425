"""What a replay can be run under: a policy by the name that simulations use, as an engine and a daemon of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from engine.tunables import TunableValue
from envs.profile import Profile
from policies.named import UNBUDGETED, World, contender
from policies.rules import presets

NATIVE: Final = "none"  # no daemon, native defaults


@dataclass(frozen=True)
class Side:
    """``values``: knobs at the engine's start. ``policy``: that section of the daemon's configuration; None without a
    daemon.
    """

    name: str
    values: tuple[tuple[str, TunableValue], ...] = ()
    policy: tuple[tuple[str, Any], ...] | None = None

    @property
    def is_tuned(self) -> bool:
        """Whether a daemon runs beside the engine."""
        return self.policy is not None

    @property
    def label(self) -> str:
        """Heads its column."""
        return "static native" if self.name == NATIVE else self.name

    @property
    def description(self) -> str:
        if self.name == NATIVE:
            return "daemon off, native defaults"
        return f"daemon off, {self.name}" if self.policy is None else f"daemon on, {self._policy_text}"

    @property
    def engine_options(self) -> tuple[str, ...]:
        return tuple(part for knob, value in self.values for part in ("--set", f"{knob}={value}"))

    @property
    def _policy_text(self) -> str:
        return f"rules {self.name}" if "rules" in dict(self.policy or ()) else self.name


DEFAULT_SIDES: Final = (Side("default", policy=(("rules", "default"),)), Side(NATIVE))


def sides(names: Sequence[str], profile: Path | None, found: Profile | None) -> tuple[Side, ...]:
    """Sides by their names. ``found``: the profile that was read from ``profile``. Raises ValueError, one line."""
    twice = next((name for number, name in enumerate(names) if name in names[:number]), None)
    if twice is not None:
        raise ValueError(f"{twice}: is compared with itself; name every policy once")
    return tuple(side(name, profile, found) for name in names)


def side(text: str, profile: Path | None, found: Profile | None) -> Side:
    """A side by its name: ``none``, ``static:KNOB=VALUE,...``, a preset, a rules file, ``predictor``, ``auto``,
    ``learned:FOLDER``, ``unbudgeted:NAME``. ``found``: the profile that was read from ``profile``; None where that is
    for the quality budget alone, so for rules. Raises ValueError, one line.
    """
    known = contender(text, World(found))
    kind, _, rest = text.partition(":")
    if text.startswith(UNBUDGETED):
        inner = side(rest, profile, found)
        policy = dict(inner.policy or ()) | {"quality_budget": None}
        return replace(inner, name=text, policy=None if inner.policy is None else tuple(policy.items()))
    if known.policy is None:
        return Side(text, tuple(known.values.items()))
    section: dict[str, Any] = {}
    is_rules = kind not in {"predictor", "learned", "auto"}
    if profile is not None and (is_rules or found is not None):
        section["profile"] = str(profile.resolve())
    if not known.budgeted:
        section["quality_budget"] = None  # somebody else's rules, to be compared as they are
    if not is_rules:
        section["use"] = kind
        if kind == "learned":
            section["learned"] = str(Path(rest).resolve())
    else:
        section["rules"] = text if text in presets() else str(Path(text).resolve())
    return Side(text, policy=tuple(section.items()))
