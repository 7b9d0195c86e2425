"""What there is to know of a kind of engine before one is seen: names, knobs, how they are said, where to ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from autotune.adapters.base import Flag
from autotune.adapters.names import MetricNames
from autotune.adapters.page import View
from autotune.adapters.reading import Told
from autotune.adapters.web import Web
from engine.tunables import Tunable, TunableValue
from policies.restart_advice import Storage


@dataclass(frozen=True)
class Asked:
    """What an engine tells at its other addresses; asked once in a run. ``version``: empty if unknown."""

    version: str = ""
    told: Told = field(default_factory=Told)


@dataclass(frozen=True)
class EngineKind:
    """``ask`` asks for what does not change while an engine runs; it never raises for what is not answered.
    ``on_page``: knobs and capacity as far as the page itself tells them. ``pause``, ``resume``: paths to POST to, empty
    where the engine cannot finish what it has without throwing anything away. ``besides``: what else the start must be
    told for some knobs; it may raise ValueError.
    """

    name: str
    names: MetricNames
    tunables: Mapping[str, Tunable]
    flags: Mapping[str, Flag]
    storage: Mapping[str, Storage]
    kv_knobs: tuple[str, ...]
    ask: Callable[[Web], Asked]
    on_page: Callable[[View], Told]
    slot_knob: str = ""
    pause: str = ""
    resume: str = ""
    besides: Callable[[Mapping[str, TunableValue], Told], dict[Flag, str]] | None = None


def parsed(tunables: Mapping[str, Tunable], found: Mapping[str, object]) -> dict[str, TunableValue]:
    """The knobs whose value is one that is declared; any other is left out as unknown."""
    values: dict[str, TunableValue] = {}
    for knob, value in found.items():
        try:
            values[knob] = tunables[knob].parse(value)
        except ValueError:
            continue
    return values


def whole(value: object) -> int | None:
    """A whole number > 0, as text or as a number; None for anything else."""
    try:
        number = int(str(value))
    except ValueError:
        return None
    return number if 0 < number < 2**53 else None
