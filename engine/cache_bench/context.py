"""What a row of the benchmark is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from engine.loader import LoadedModel


class Skipped(Exception):  # noqa: N818 - nothing went wrong
    """A row that cannot be measured here. The text says what it would need."""


@dataclass(frozen=True)
class Context:
    """Inputs shared by all rows.

    ``model``: model folder. ``text``: folder of texts (.txt or .txt.gz), ``traces``: folder of request traces; None
    where the user gave none. ``seed``: of everything random. ``quick``: fewer samples, for a first look; figures of a
    quick run prove nothing. ``log`` prints one line of progress.
    """

    model: Path
    text: Path | None = None
    traces: Path | None = None
    seed: int = 0
    quick: bool = False
    log: Callable[[str], None] = print
    device: str = "cpu"
    _loaded: dict[str, LoadedModel] = field(default_factory=dict, repr=False)

    def load(self, dtype: str = "auto") -> LoadedModel:
        """The model, loaded once per dtype and shared: rows must not change its weights. May raise EngineError."""
        from engine.loader import load_model  # noqa: PLC0415 - torch, which a row without a model never needs

        if dtype not in self._loaded:
            self._loaded[dtype] = load_model(self.model, self.device, dtype)
        return self._loaded[dtype]

    def skip(self, reason: str) -> NoReturn:
        """Give this row up: its keys are null and ``reason`` stands under ``skipped``."""
        raise Skipped(reason)

    def need_text(self) -> Path:
        """The folder of texts; skips the row without one."""
        return self.text or self.skip("needs texts: make bench-cache TEXT=FOLDER")

    def need_traces(self) -> Path:
        """The folder of traces; skips the row without one."""
        return self.traces or self.skip("needs traces: make bench-cache TRACES=FOLDER")
