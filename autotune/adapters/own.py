"""Our own engine behind the same interface: everything by its control socket, as the daemon has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from autotune.adapters.base import Identity
from engine.control_client import EngineUnreachable
from engine.stats import EngineStats
from engine.tunables import TUNABLES, Tunable


class HasStats(Protocol):
    """What is used of :class:`engine.control_client.ControlClient`."""

    def stats(self) -> EngineStats: ...


class OwnEngine:
    """Implements :class:`autotune.adapters.base.EngineAdapter` over ``control``; its knobs change while it serves, by
    :class:`autotune.actuator.Actuator`.
    """

    def __init__(self, control: HasStats) -> None:
        self._control = control

    @property
    def kind(self) -> str:
        return "autotune"

    @property
    def tunables(self) -> Mapping[str, Tunable]:
        return TUNABLES

    def read(self) -> Mapping[str, EngineStats]:
        return {"": self._control.stats()}

    def identity(self) -> Identity:
        return Identity(self.kind, "", self._control.stats().model)

    def healthy(self) -> bool:
        try:
            self._control.stats()
        except EngineUnreachable:
            return False
        return True
