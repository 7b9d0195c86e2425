"""Finished cells in a file of JSON lines: an evaluation that was stopped goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from engine.json_text import load_json
from engine.whole_file import write_whole
from policies.evaluation.cells import Cell, Score, Setup, run_cell
from policies.executors import Executor

_CELLS = "cells.jsonl"
_SETUP = "setup.json"


class StoreError(ValueError):
    """A folder that cannot be used; one line."""


class Store:
    """Scores by cell, in a folder that belongs to one setup. Raises StoreError if it has another's, OSError."""

    def __init__(self, folder: Path, setup: Setup) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.setup = folder, setup
        wanted = json.dumps(setup.fingerprint(), sort_keys=True, indent=1)
        place = folder / _SETUP
        if place.exists() and place.read_text(encoding="utf-8", errors="replace") != wanted:
            raise StoreError(f"{folder} has results of another profile, duration or target; choose another folder")
        write_whole(place, wanted)
        self._scores = self._read()

    def _read(self) -> dict[str, Score]:
        place, scores = self.folder / _CELLS, dict[str, Score]()
        if not place.exists():
            return scores
        lines = place.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        # The last line of a run that was killed may be half a line: it is dropped, from the file as well.
        if lines and not lines[-1].endswith("\n"):
            lines.pop()
            write_whole(place, "".join(lines))
        for number, line in enumerate(lines, 1):
            try:
                row = load_json(line)
                scores[row["key"]] = Score.from_json(row["score"])
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise StoreError(f"{place}: line {number} is no result of this version; remove the file") from error
        return scores

    def get(self, cell: Cell) -> Score:
        """Raises KeyError for a cell that was not run."""
        return self._scores[cell.key]

    def missing(self, cells: Iterable[Cell]) -> list[Cell]:
        """Those that still have to be run, each once."""
        return list({cell.key: cell for cell in cells if cell.key not in self._scores}.values())

    def run(self, cells: Sequence[Cell], executor: Executor, done: Callable[[], None] | None = None) -> None:
        """Run what is missing; ``done`` is called after each cell."""
        todo = self.missing(cells)
        if not todo:
            return
        with (self.folder / _CELLS).open("a", encoding="utf-8") as file:
            for place, score in executor.map(partial(run_cell, self.setup), todo):
                cell = todo[place]
                self._scores[cell.key] = score
                file.write(json.dumps(_row(cell, score)) + "\n")
                file.flush()
                if done is not None:
                    done()


def _row(cell: Cell, score: Score) -> dict[str, Any]:
    return {
        "key": cell.key,
        "scenario": cell.scenario.text,
        "seed": cell.seed,
        "contender": cell.contender,
        "frozen": list(cell.frozen),
        "rate": cell.rate,
        "score": score.to_json(),
    }
