"""What a policy sees and what it can do: observation vector, Discrete actions and their mask. numpy and gymnasium only.

Used by training and by the daemon alike. Layout of the vector, float32, every entry in [0, 1]:

    features (encoded, 0 where unknown) | one-hot of every knob's value (all 0 where unknown) | 1 per unknown feature

Changing a feature, a knob's values or their order changes the environment: bump its version.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from gymnasium.spaces import Box, Discrete, Space
from numpy.typing import NDArray

from engine.stats import EngineStats
from engine.tunables import TUNABLES, Tunable, TunableValue, TunableValues
from envs.features import FEATURES, View
from envs.port import Change
from envs.window import number

NOTHING: Final = 0
"""The action that changes nothing."""


@dataclass(frozen=True)
class Observation:
    """What policies see at one tick; JSON-able through :meth:`to_json`.

    ``stamp_ns``: the observer's monotonic clock. ``values``: every feature by name, raw, in its declared unit and
    inside its declared bounds, None where unknown. ``tunables``: knobs in force, as far as known. ``held``: knobs that
    may not be moved now. ``observed_s``: for how long this engine instance has been watched without a break.
    ``instance``: the engine's, None when it is lost. ``pool_bytes``: of its KV pool, None where it does not tell; no
    part of the vector.
    """

    stamp_ns: int
    values: Mapping[str, float | None]
    tunables: Mapping[str, TunableValue]
    held: frozenset[str] = field(default_factory=frozenset)
    observed_s: float = 0.0
    instance: str | None = None
    pool_bytes: int | None = None

    def vector(self) -> NDArray[np.float32]:
        """A fresh float32 array of :func:`observation_space`'s shape."""
        known = [self.values.get(feature.name) for feature in FEATURES]
        encoded = [0.0 if v is None else f.encode(v) for f, v in zip(FEATURES, known, strict=True)]
        chosen = [float(self.tunables.get(t.name) == value) for t in TUNABLES.values() for value in t.values]
        unknown = [float(value is None) for value in known]
        return np.clip(np.array([*encoded, *chosen, *unknown], dtype=np.float32), 0.0, 1.0)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; floats survive a round trip exactly."""
        return {
            "stamp_ns": self.stamp_ns,
            "values": dict(self.values),
            "tunables": dict(self.tunables),
            "held": sorted(self.held),
            "observed_s": self.observed_s,
            "instance": self.instance,
            "pool_bytes": self.pool_bytes,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Observation:
        """Inverse of :meth:`to_json`. Raises ValueError for anything else."""
        try:
            return cls(
                stamp_ns=int(data["stamp_ns"]),
                values={f.name: number(data["values"].get(f.name)) for f in FEATURES},
                tunables=dict(data["tunables"]),
                held=frozenset(data["held"]),
                observed_s=float(data["observed_s"]),
                instance=data["instance"],
                pool_bytes=_bytes(data.get("pool_bytes")),  # journals of before do not have it
            )
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"not an observation: {error!r}") from error


def observation_space() -> Space[NDArray[np.float32]]:
    """Box of float32 in [0, 1], one entry per line of :func:`vector_names`."""
    return Box(0.0, 1.0, shape=(len(vector_names()),), dtype=np.float32)


def vector_names() -> tuple[str, ...]:
    """What each entry of the vector is: ``load``, ``kv_format=int8``, ``unknown:load``."""
    one_hot = (f"{t.name}={value}" for t in TUNABLES.values() for value in t.values)
    return (*(f.name for f in FEATURES), *one_hot, *(f"unknown:{f.name}" for f in FEATURES))


def known_tunables(stats: EngineStats | None, tunables: Mapping[str, Tunable] = TUNABLES) -> TunableValues:
    """The knobs in force that are declared, at declared values; others are left out as unknown."""
    values: TunableValues = {}
    if stats is None or not isinstance(stats.effective, Mapping):
        return values
    for name, tunable in tunables.items():
        try:
            values[name] = tunable.parse(stats.effective[name])
        except (KeyError, ValueError):
            continue
    return values


def observe(view: View, *, stamp_ns: int, observed_s: float, held: Collection[str] = ()) -> Observation:
    """The observation at the end of a view's windows. Never raises, whatever figures the engine gives."""
    after = view.short.after
    return Observation(
        stamp_ns=stamp_ns,
        values={feature.name: feature.read(view) for feature in FEATURES},
        tunables=known_tunables(after),
        held=frozenset(held),
        observed_s=observed_s,
        instance=None if after is None else str(after.instance),
        pool_bytes=_bytes(view.short.gauge("kv_pool_bytes")),
    )


def _bytes(value: object) -> int | None:
    """A size in bytes as an engine or a journal gives it; None for whatever is none."""
    found = number(value)
    return int(found) if found is not None and found >= 1 else None


def all_changes(tunables: Mapping[str, Tunable] = TUNABLES) -> tuple[Change, ...]:
    """Every change there is; action ``i`` > 0 means ``all_changes()[i - 1]``."""
    return _CHANGES if tunables is TUNABLES else _changes(tunables)


def _changes(tunables: Mapping[str, Tunable]) -> tuple[Change, ...]:
    return tuple(Change(name, value) for name, tunable in tunables.items() for value in tunable.values)


_CHANGES: Final = _changes(TUNABLES)  # asked for at every step


def action_space(tunables: Mapping[str, Tunable] = TUNABLES) -> Discrete:
    """Discrete(1 + number of values over all knobs): nothing, or one knob to one value."""
    return Discrete(1 + len(all_changes(tunables)))


def decode_action(action: int, tunables: Mapping[str, Tunable] = TUNABLES) -> Change | None:
    """The change that an action stands for, None for nothing. Raises ValueError outside the space."""
    changes = all_changes(tunables)
    if not 0 <= action <= len(changes):
        raise ValueError(f"action {action} is outside 0..{len(changes)}")
    return None if action == NOTHING else changes[action - 1]


def encode_action(change: Change | None, tunables: Mapping[str, Tunable] = TUNABLES) -> int:
    """Inverse of :func:`decode_action`. Raises ValueError for a change that no action stands for."""
    if change is None:
        return NOTHING
    try:
        return 1 + all_changes(tunables).index(change)
    except ValueError:
        raise ValueError(f"no action means {change}") from None


def action_mask(
    in_force: Mapping[str, TunableValue], held: Collection[str] = (), tunables: Mapping[str, Tunable] = TUNABLES
) -> NDArray[np.int8]:
    """1 for every action that would change something: int8 [actions], as ``Discrete.sample(mask)`` takes it.

    Nothing is always possible; a change is not when its knob is held, unknown, or has that value already.
    """
    possible = [
        change.knob in in_force and change.knob not in held and in_force[change.knob] != change.value
        for change in all_changes(tunables)
    ]
    return np.array([True, *possible], dtype=np.int8)


def legal_action(action: int, mask: NDArray[np.int8]) -> int:
    """``action`` if its mask allows it, else nothing: what an algorithm without masks gets, in training and after."""
    return action if mask[action] else NOTHING
