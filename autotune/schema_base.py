"""What every section of the configuration is made of."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict
from pydantic.config import JsonDict

RESTART: JsonDict = {"reload": "restart"}
"""Marks a key that a reload cannot change."""


class KeyedError(ValueError):
    """Faults by key below the place that is being checked."""

    def __init__(self, problems: Mapping[str, str]) -> None:
        super().__init__("; ".join(problems.values()))
        self.problems = problems


class Section(BaseModel):
    # validate_default: a default is held to the same bounds, so a bad one cannot hide behind never being written.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True)
