"""The schema of the daemon's configuration and its defaults; docs and ``check-config`` derive from it.

Keys marked ``restart`` take effect at the next start only, all others at a reload.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, Self, TypeVar

from pydantic import Field, field_validator, model_validator

from autotune.schema_base import RESTART, KeyedError, Section
from autotune.schema_engine import EngineSection, RestartSection
from engine.tunables import TUNABLES, Tunable, TunableValue
from policies.usual_budget import USUAL_BUDGET

__all__ = ["RESTART", "Config", "KeyedError", "Mode", "PolicySection", "Section"]

Mode = Literal["active", "advise", "off"]
_T = TypeVar("_T")


class TargetsSection(Section):
    """Latency targets: the given quantile of each is to stay below."""

    ttft_s: float = Field(default=1, gt=0, le=3600, description="Arrival to first token.")
    tbt_s: float = Field(default=0.1, gt=0, le=3600, description="Gap between two tokens.")
    quantile: float = Field(default=0.95, gt=0, lt=1, description="Of both.")


class PolicySection(Section):
    """Who decides."""

    use: Literal["rules", "predictor", "learned", "auto"] = Field(
        default="rules",
        description="Threshold rules; the predictor, which needs a profile of the engine; a learned policy, which "
        "falls back to the rules; or auto: of these the best by what was measured on the profile, else the rules.",
    )
    rules: str = Field(default="default", min_length=1, description="A preset's name, or the path of a rules file.")
    profile: Path | None = Field(
        default=None,
        description="From `autotune profile`; what the predictor calculates with, a learned or bundled policy must be "
        "for, and the guard keeps the quality budget by.",
    )
    learned: Path | None = Field(default=None, description="Folder of a learned policy, from `autotune export`.")
    quality_budget: float | None = Field(
        default=USUAL_BUDGET,
        ge=0,
        le=1,
        description="Mean relative loss per generated token, kept by the guard whoever decides: by what the `profile` "
        "says that settings lose, or by published figures where it has none. null: none is kept.",
    )

    @model_validator(mode="after")
    def _has_profile(self) -> Self:
        if self.use == "predictor" and self.profile is None:
            raise KeyedError({"profile": "the predictor needs one; make it with autotune profile"})
        if self.use == "learned" and self.learned is None:
            raise KeyedError({"learned": "name the folder that autotune export made"})
        return self


class ByCost(Section):
    """Seconds by cost class of the knob."""

    step: float = Field(default=2, ge=0, le=86400, description="Knobs that take effect at the next step.")
    background: float = Field(default=5, ge=0, le=86400, description="Knobs that converge by background work.")


class Rate(Section):
    """At most ``changes`` within ``per_s`` seconds."""

    changes: int = Field(ge=0, le=100_000, description="Changes at most ...")
    per_s: float = Field(default=60, gt=0, le=86400, description="... within so many seconds.")


class RatesByCost(Section):
    """Rate limits by cost class."""

    step: Rate = Rate(changes=20)
    background: Rate = Rate(changes=12)


class EffectsSection(Section):
    """What follows a change: it is judged one window later, taken back if it missed, and not tried again as long as the
    load is the same.
    """

    rollback: bool = Field(default=True, description="Take back what missed; false only tells.")
    tolerance: float = Field(
        default=0.25, ge=0, le=10, description="A tail over target counts if worse than before and predicted by this."
    )
    cool_down_s: float = Field(default=60, ge=0, le=86400, description="How long a knob stays after a rollback.")
    differs: float = Field(
        default=0.3,
        gt=0,
        le=10,
        description="Arrivals, KV demand or lengths that differ by this share make another load.",
    )
    canary: tuple[str, ...] = Field(
        default=(), description="Knobs whose coarse changes begin with one step that is judged first."
    )

    @field_validator("canary")
    @classmethod
    def _known_knobs(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [knob for knob in value if knob not in TUNABLES]
        if unknown:
            raise ValueError(f"unknown tunable {unknown[0]!r}; known: {', '.join(TUNABLES)}")
        return value


class GuardSection(Section):
    """What the guard enforces on every proposal, whoever made it."""

    dwell_s: ByCost = Field(default=ByCost(), description="How long a knob stays before it moves again.")
    knob_dwell_s: dict[str, float] = Field(default={}, description="The same for single knobs.")
    rates: RatesByCost = RatesByCost()
    allowed: dict[str, tuple[int | str, ...]] = Field(
        default={}, description="Values that may be set, by knob; a knob left out may take all, one with none stays."
    )
    retry_s: float = Field(
        default=60, ge=0, le=86400, description="Before a change the engine did not take is retried."
    )
    native_fits: float = Field(
        default=0.95, gt=0, le=16, description="No return to native above this share of the pool in native demand."
    )
    effects: EffectsSection = EffectsSection()

    @field_validator("knob_dwell_s")
    @classmethod
    def _known_knobs(cls, value: dict[str, float]) -> dict[str, float]:
        return _by_knob(value, lambda _, seconds: _at_most_a_day(seconds))

    @field_validator("allowed")
    @classmethod
    def _known_values(cls, value: dict[str, tuple[TunableValue, ...]]) -> dict[str, tuple[TunableValue, ...]]:
        return _by_knob(value, lambda tunable, values: tuple(tunable.parse(item) for item in values))


def _by_knob(given: Mapping[str, _T], check: Callable[[Tunable, _T], _T]) -> dict[str, _T]:
    """``given`` with every value checked; raises one error for all keys that are wrong."""
    checked: dict[str, _T] = {}
    problems: dict[str, str] = {}
    for knob, value in given.items():
        if knob not in TUNABLES:
            problems[knob] = f"unknown tunable; known: {', '.join(TUNABLES)}"
            continue
        try:
            checked[knob] = check(TUNABLES[knob], value)
        except ValueError as error:
            problems[knob] = str(error).removeprefix(f"{knob}: ")
    if problems:
        raise KeyedError(problems)
    return checked


def _at_most_a_day(seconds: float) -> float:
    if not 0 <= seconds <= 86400:
        raise ValueError(f"must be 0 to 86400 s, got {seconds:g}")
    return seconds


class JournalSection(Section):
    """Where every tick is written down."""

    path: Path | None = Field(
        default=None, description="SQLite file; in the state directory if absent.", json_schema_extra=RESTART
    )
    max_rows: int = Field(default=200_000, ge=100, le=100_000_000, description="Then the oldest go, no-ops first.")
    max_bytes: int = Field(default=256 * 2**20, ge=2**20, le=2**40, description="The same by size of the file.")


class AdminSection(Section):
    """HTTP for the page, metrics and decisions, readable without authentication, therefore on loopback unless told
    otherwise; what changes anything needs the token.
    """

    enabled: bool = Field(default=True, description="Whether there is one.", json_schema_extra=RESTART)
    host: str = Field(default="127.0.0.1", min_length=1, description="Address to listen on.", json_schema_extra=RESTART)
    port: int = Field(default=9466, ge=0, le=65535, description="0 takes a free one.", json_schema_extra=RESTART)
    token_file: Path | None = Field(
        default=None,
        description="Secret that orders need (`autotune mode`, `reload`, the page); made beside the journal if absent.",
        json_schema_extra=RESTART,
    )


class HousekeepingSection(Section):
    """Periodic jobs beside the control loop."""

    prune_every_s: float = Field(
        default=300, ge=1, le=86400, description="Seconds between prunings of the journal.", json_schema_extra=RESTART
    )


class Config(Section):
    """The whole file; an empty one is valid."""

    mode: Mode = Field(default="active", description="active writes, advise does all but the write, off only watches.")
    objective: Literal["interactive", "batch"] = Field(
        default="interactive", description="What is rewarded: requests inside the targets, or tokens."
    )
    window_s: float = Field(default=10, gt=0, le=3600, description="Seconds over which load and latency are judged.")
    long_window_s: float = Field(default=60, gt=0, le=86400, description="Seconds for lengths and outcomes.")
    tick_s: float = Field(default=1, ge=0.05, le=600, description="Seconds between two decisions.")
    on_exit: Literal["leave", "restore"] = Field(
        default="leave",
        description="When the daemon is stopped: leave the engine's settings, or restore what its changes replaced.",
    )
    engine: EngineSection = EngineSection()
    targets: TargetsSection = TargetsSection()
    policy: PolicySection = PolicySection()
    guard: GuardSection = GuardSection()
    restart: RestartSection = RestartSection()
    journal: JournalSection = JournalSection()
    admin: AdminSection = AdminSection()
    housekeeping: HousekeepingSection = HousekeepingSection()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = {}
        if self.window_s < max(self.tick_s, 2 * self.engine.poll_s):
            problems["window_s"] = f"{self.window_s:g} s must hold a tick and two polls (tick_s, engine.poll_s)"
        if self.long_window_s < self.window_s:
            problems["long_window_s"] = f"{self.long_window_s:g} s is shorter than window_s, {self.window_s:g} s"
        if self.engine.stale_after_s < self.engine.poll_s:
            problems["engine.stale_after_s"] = "every reading would be stale before the next poll"
        if self.restart.allowed and self.engine.kind == "autotune":
            problems["restart.allowed"] = "our own engine changes while it runs and is never restarted"
        if problems:
            raise KeyedError(problems)
        return self
