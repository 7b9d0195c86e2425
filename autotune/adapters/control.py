"""An engine of another make where the daemon expects ours: read as ours is, and never written while it runs."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.adapters.base import RestartableEngine
from engine.control_client import EngineUnreachable, PatchAnswer, TunablesView
from engine.stats import EngineStats
from engine.text import one_line
from engine.tunables import TunableValue


class WatchedEngine:
    """Implements :class:`autotune.actuator.Control` over an adapter. ``label``: which engine of a page that has
    several; None where there is one.

    Its knobs are not ours: none is offered to be written here, so that no policy finds one to move.
    """

    def __init__(self, adapter: RestartableEngine, label: str | None = None) -> None:
        self.adapter, self._label = adapter, label
        self._last: EngineStats | None = None

    def stats(self) -> EngineStats:
        readings = self.adapter.read()
        if self._label is not None and self._label not in readings:
            raise EngineUnreachable(one_line(f"no engine {self._label!r} there, only {', '.join(map(repr, readings))}"))
        if self._label is None and len(readings) > 1:
            known = ", ".join(readings)
            raise EngineUnreachable(one_line(f"several engines answer there ({known}); name one in engine.label"))
        self._last = readings[next(iter(readings)) if self._label is None else self._label]
        return self._last

    def tunables(self) -> TunablesView:
        last = self._last or self.stats()
        return {
            "instance": last.instance,
            "revision": 0,
            "desired": {},
            "effective": dict(last.effective),
            "writers": {},
            "progress": {"resident": [], "converged_fraction": 1.0, "held_below_format_bytes": 0},
        }

    def patch(
        self, changes: Mapping[str, TunableValue], *, writer: str, reason: str = "", if_revision: int | None = None
    ) -> PatchAnswer:
        del writer, reason, if_revision
        raise ValueError(f"{', '.join(changes)}: this engine takes its settings at its start only")
