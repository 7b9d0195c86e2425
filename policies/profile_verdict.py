"""What an evaluation found on one profile of who may decide: a small document that ``auto`` goes by. No torch.

``autotune evaluate`` writes one (:mod:`policies.evaluation.judged`); those that come with the program lie in
``policies/bundled/verdicts``, one per digest of a profile. One that is damaged is refused with a line that says why.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, ValidationError, model_validator

from engine.sizes import format_size
from envs import SIMULATED_ENGINE_ID
from policies.advisor import PREDICTOR
from policies.card import (
    Name,
    PolicyFileError,
    Positive,
    ProfileOf,
    Sha256,
    Share,
    Strict,
    Text,
    file_bytes,
    short_line,
)

VERDICTS: Final = "verdicts"
MAX_VERDICT_BYTES: Final = 1 << 16
MOST_VERDICTS: Final = 32  # more are not looked at: names of damaged ones label a metric
MOST_CANDIDATES: Final = 16
RULES: Final = "rules"
LEARNED: Final = "learned"
JUDGED_RULES: Final = "default"  # the one preset that is a candidate: others are somebody else's, or are yours
Kind = Literal["rules", "predictor", "learned"]
_SIMPLEST_FIRST: Final[tuple[Kind, ...]] = ("rules", "predictor", "learned")
# Of what may be asked of an evaluation: a verdict that cannot be written is found out after hours.
_MOST_LOSS: Final = 1e6
_YEAR_S: Final = 31_536_000.0


class Attained(Strict):
    """Requests inside all targets, of those offered: IQM over workloads and seeds, with its 95 % interval."""

    value: Share
    low: Share
    high: Share

    @model_validator(mode="after")
    def _is_ordered(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"its interval goes from {self.low:g} down to {self.high:g}")
        return self

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


class Judged(Strict):
    """A policy that moves knobs and what it did. ``name``: of a learned one its card's, with the ``sha256`` of its
    weights; else ``default`` or ``predictor``. ``worst_loss``: token-weighted mean loss on the workload where that is
    largest; ``inside_budget``: of the evaluation, on every workload.
    """

    kind: Kind
    name: Name
    sha256: Sha256 | None = None
    iqm: Attained
    worst_loss: float
    inside_budget: bool

    @model_validator(mode="after")
    def _is_identified(self) -> Self:
        if (self.sha256 is not None) != (self.kind == LEARNED):
            raise ValueError("a learned policy has the sha256 of its weights, and no other has one")
        usual = {RULES: JUDGED_RULES, PREDICTOR: PREDICTOR}.get(self.kind, self.name)
        if self.name != usual:
            raise ValueError(f"{self.name} is no candidate: {self.kind} are judged as {usual}")
        return self

    @property
    def identity(self) -> tuple[str, str, str]:
        return self.kind, self.name, self.sha256 or ""


class ProfileVerdict(Strict):
    """See the module. ``program``: its version; ``environment``: with its version, which changes with what figures
    mean. ``pool_bytes``: None for the profile's own. ``best_static``: in hindsight, per workload.
    """

    kind: Literal["kv-autotune verdict"] = "kv-autotune verdict"
    version: Literal[1] = 1
    created: Text
    program: Text
    environment: Text
    profile: ProfileOf
    quality_budget: Annotated[float, Field(ge=0, le=_MOST_LOSS)]
    workloads: Annotated[list[Text], Field(min_length=1, max_length=256)]
    seeds: Annotated[int, Field(ge=1)]
    duration_s: Annotated[float, Field(gt=0, le=_YEAR_S)]
    interval_s: Positive
    length_scale: Positive
    pool_bytes: Annotated[int, Field(ge=1)] | None
    candidates: Annotated[list[Judged], Field(min_length=1, max_length=MOST_CANDIDATES)]
    native: Attained
    best_static: Attained

    @model_validator(mode="after")
    def _hangs_together(self) -> Self:
        if len({one.identity for one in self.candidates}) < len(self.candidates):
            raise ValueError("a candidate is there twice")
        for one in self.candidates:
            if one.inside_budget != (one.worst_loss <= self.quality_budget):
                told = "inside" if one.inside_budget else "outside"
                raise ValueError(f"{one.name} lost {one.worst_loss:g}, which is not {told} {self.quality_budget:g}")
        return self

    def ranked(self) -> list[Judged]:
        """The best first. IQMs that are equal to three decimals are the same, and the simpler goes first."""
        return sorted(
            self.candidates,
            key=lambda one: (-round(one.iqm.value, 3), _SIMPLEST_FIRST.index(one.kind), one.name, one.sha256 or ""),
        )

    def of(self) -> str:
        """What it rests upon, in a few words."""
        kind = "estimated" if self.profile.estimated else "measured"
        told = f"{len(self.workloads)} workloads, {self.seeds} seeds of {self.duration_s:g} s, {kind} profile"
        # Figures of less memory or shorter requests are those of another load than the profile's own.
        told += "" if self.pool_bytes is None else f", a pool of {format_size(self.pool_bytes)}"
        return told + ("" if self.length_scale == 1 else f", lengths divided by {self.length_scale:g}")


def read_verdict(path: Path) -> ProfileVerdict:
    """One that is well-formed. Raises PolicyFileError."""
    data = file_bytes(path, MAX_VERDICT_BYTES)
    try:
        return ProfileVerdict.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "file"
        raise PolicyFileError(f"{path}: no usable verdict: {place[:100]}: {short_line(first['msg'])}") from error
    except (ValueError, RecursionError) as error:
        raise PolicyFileError(f"{path}: no usable verdict: {short_line(error)}") from error


def objection(verdict: ProfileVerdict) -> str | None:
    """Why its figures do not count for this program, in one line."""
    if verdict.environment != SIMULATED_ENGINE_ID:
        return f"it was measured in {verdict.environment!r:.80}; this version has {SIMULATED_ENGINE_ID}"
    return None


def verdict_files(folder: Path) -> list[Path]:
    """Those in a folder, by name; none where there is no such folder."""
    try:
        return sorted(folder.glob("*.json"))[:MOST_VERDICTS]
    except OSError:
        return []


def verdict_text(verdict: ProfileVerdict) -> str:
    """The verdict as it is written."""
    document: dict[str, Any] = verdict.model_dump(mode="json")
    return json.dumps(document, indent=1) + "\n"
