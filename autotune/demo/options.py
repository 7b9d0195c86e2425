"""What to demonstrate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from autotune.demo.sides import DEFAULT_SIDES, Side
from autotune.demo.stack import VERBS
from envs.profile import Profile

# The daemon does nothing before it has seen one whole window; until then the start of a load would run as if untuned.
SETTLE_S = 9.0


class DemoError(Exception):
    """The demonstration cannot go on; one line."""


@dataclass(frozen=True)
class DemoOptions:
    """What to demonstrate.

    ``sides``: what every round is replayed under, the one to be shown first; at least two. ``profile``: of this model
    on this machine, with which the simulator then says how the sides should have compared. ``notes``: said with the
    load. ``run_folder`` None: a temporary one, removed at the end unless something failed; one that is named holds the
    last demonstration. ``called``: how this program is called, as words.
    """

    model: Path
    device: str = "auto"
    dtype: str = "auto"
    pairs: int = 1
    duration_s: float = 90.0
    workload: str = "reasoning-bursty"
    sides: tuple[Side, ...] = DEFAULT_SIDES
    profile: Profile | None = None
    seed: int = 1
    notes: tuple[str, ...] = ()
    run_folder: Path | None = None
    called: tuple[str, ...] = ("autotune",)
    program: tuple[str, ...] = VERBS  # what runs the verb `engine`
    settle_s: float = SETTLE_S
