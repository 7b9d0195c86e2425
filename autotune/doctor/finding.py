"""What a check says. Stdlib only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad it is: a problem keeps something from working, a warning makes it worse than it could be."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """``check``: which one; ``found``: what there is; ``advice``: what to do about it, empty where all is well."""

    check: str
    level: Level
    found: str
    advice: str = ""


def ok(check: str, found: str) -> Finding:
    return Finding(check, Level.OK, found)


def warning(check: str, found: str, advice: str) -> Finding:
    return Finding(check, Level.WARNING, found, advice)


def problem(check: str, found: str, advice: str) -> Finding:
    return Finding(check, Level.PROBLEM, found, advice)
