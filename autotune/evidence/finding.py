"""What measuring a claim comes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

Documents = Mapping[str, Mapping[str, Any]]
"""Last lines of benchmarks by the name of their source."""


class Verdict(Enum):
    """``MET``: as claimed. ``BEATEN``: better than claimed. ``FALSE``: not so here. ``PARTLY``: half of it holds.
    ``OPEN``: a benchmark that it needs was skipped or failed.
    """

    MET = "met"
    BEATEN = "beaten"
    FALSE = "shown false"
    PARTLY = "partly"
    OPEN = "not measured"


@dataclass(frozen=True)
class Finding:
    """``figures``: one sentence of what was measured; ``remark``: what the figures do not say by themselves."""

    verdict: Verdict
    figures: str
    remark: str = ""


class MissingFigureError(Exception):
    """A figure that a claim needs is null or absent; the message names it."""


def figure(documents: Documents, source: str, *path: str) -> float:
    """The number at ``path`` of a source's last line. Raises MissingFigureError."""
    value: Any = documents.get(source)
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise MissingFigureError(f"{source} has no {'.'.join(path)}")
    return float(value)


def better(value: float, claimed: float) -> Verdict:
    """Of a figure that should be large: within 2 % of what is claimed is met."""
    if value < 0.98 * claimed:
        return Verdict.FALSE
    return Verdict.BEATEN if value > 1.02 * claimed else Verdict.MET
