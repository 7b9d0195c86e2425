"""What a restart is planned as, how far it has come, and what became of it. The state is JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, TypedDict

from autotune.adapters.restart_file import Form
from engine.shapes import fits
from engine.tunables import TunableValue


class Phase(StrEnum):
    DRAINING = "draining"  # nothing has been touched yet
    RESTARTING = "restarting"  # the file is written, the commands run
    STARTING = "starting"  # until it is healthy and shows what was wanted
    RESTORING = "restoring"  # the file is as before, the commands run again
    RETURNING = "returning"  # until it is healthy as before


@dataclass(frozen=True)
class RestartPlan:
    """How an engine is restarted: the configuration's section. ``commands`` run one after the other."""

    file: Path
    form: Form
    commands: tuple[tuple[str, ...], ...]
    drain: Literal["idle", "pause"] = "idle"
    drain_s: float = 300.0
    ready_s: float = 600.0


class _Kept(TypedDict):
    """What the journal must hold of a restart under way; see :class:`Work`."""

    tick: int
    changes: list[list[TunableValue]]
    before: dict[str, TunableValue]
    phase: str
    file_before: str | None
    is_paused: bool
    held: float
    why: str


@dataclass(frozen=True)
class Work:
    """A restart under way; JSON-able by :meth:`to_json`. ``before``: the knobs as they were; ``file_before``: the file.
    ``since_ns``: of the phase, monotonic. ``stopped_ns``: when the first command ran. ``held``: requests that a paused
    engine had taken in and not begun. ``up_ns``: since when it is healthy again, with other values than wanted.
    """

    tick: int
    changes: tuple[tuple[str, TunableValue], ...]
    before: Mapping[str, TunableValue]
    phase: Phase
    since_ns: int
    file_before: str | None = None
    is_paused: bool = False
    stopped_ns: int | None = None
    held: float = 0.0
    up_ns: int | None = None
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "changes": [list(change) for change in self.changes], "phase": str(self.phase)}

    @classmethod
    def resumed(cls, data: Mapping[str, Any], now_ns: int) -> Work:
        """As a daemon before this one left it: commands that it had begun are over, as far as anybody knows; those that
        take a change back are run again. Raises KeyError, TypeError or ValueError for anything else.
        """
        if not fits(data, _Kept):
            raise ValueError("not a restart that was under way")
        phase = Phase.STARTING if data["phase"] == Phase.RESTARTING else Phase(data["phase"])
        changes = tuple((str(knob), value) for knob, value in data["changes"])
        fresh = {"phase": phase, "changes": changes, "since_ns": now_ns, "stopped_ns": None, "up_ns": None}
        return cls(**{**data, **fresh})


@dataclass(frozen=True)
class Outcome:
    """``kind``: ``applied`` (and verified), ``not_drained`` and ``refused`` (nothing was touched), ``rolled_back``, or
    ``failed`` (the engine did not come back: somebody must look). ``without_service_s``: measured, None where the
    daemon did not see all of it. ``held``: requests that were lost with a paused engine.
    """

    kind: str
    why: str
    without_service_s: float | None = None
    held: float = 0.0
