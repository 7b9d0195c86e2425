"""The quality table of one model: what every setting costs it. JSON; never inherited by another model. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine.errors import EngineError
from engine.quality.digest import model_digest
from engine.whole_file import write_whole

_Share = Annotated[float, Field(ge=0, le=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Scores(_Strict):
    """Figures over ``tokens`` predictions, as in :class:`engine.quality.tally.Figures`."""

    tokens: int
    perplexity: float
    increase_pct: float
    increase_error_pct: float
    kl: float
    top1: _Share


class Source(_Strict):
    """One kind of text: ``after_prompt`` judges the tokens that follow the prompt, ``by_position`` equal parts of the
    whole, in order.
    """

    after_prompt: Scores
    by_position: list[Scores | None]


class Probes(_Strict):
    """Retrieval probes: ``accuracy`` of ``n``, and how the answers' predictions differ from native's."""

    n: int
    accuracy: _Share
    answers: Scores


class Row(_Strict):
    """One setting. ``values``: tunables that differ from their defaults. ``text`` and ``probes`` are null where not
    measured.
    """

    values: dict[str, str | int]
    bits_per_element: float
    decode_tokens_per_s: float | None
    generated: Source
    text: Source | None
    probes: Probes | None

    @property
    def judged(self) -> Scores:
        """What the setting costs: on the text given, else on generated text."""
        return (self.text or self.generated).after_prompt


class Model(_Strict):
    """``sha256``: of configuration and weights. ``dtype``: of weights and native KV."""

    name: str
    sha256: str
    dtype: str


class QualityTable(_Strict):
    """Rows by the setting's name, native among them, and how they were measured."""

    kind: Literal["kv-autotune quality table"] = "kv-autotune quality table"
    version: Literal[1] = 1
    model: Model
    created: str
    machine: dict[str, Any]
    conditions: dict[str, Any]
    settings: dict[str, Row]

    def row_of_format(self, kv_format: str) -> Row | None:
        """The row of a format without eviction."""
        return next((row for row in self.settings.values() if row.values == {"kv_format": kv_format}), None)

    def check_model(self, folder: Path, name: str = "") -> None:
        """Raises EngineError unless the table was measured with the model in ``folder``."""
        found = model_digest(folder)
        if found != self.model.sha256:
            raise EngineError(
                f"the quality table {name} belongs to {self.model.name} ({self.model.sha256[:12]}), not to "
                f"{folder} ({found[:12]}): measure this model with autotune compare-formats"
            )


def read_table(path: Path) -> QualityTable:
    """Raises EngineError for a file that is missing or no quality table."""
    try:
        return QualityTable.model_validate_json(path.read_bytes())
    except OSError as error:
        raise EngineError(f"{path}: the quality table cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise EngineError(f"{path} is no quality table of this version ({place}: {first['msg']})") from error


def write_table(table: QualityTable, path: Path) -> None:
    """Raises OSError."""
    write_whole(path, table.model_dump_json(indent=2) + "\n")
