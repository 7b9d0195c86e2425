"""What a training run leaves in its folder, and what a run may begin in or go on from."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from engine.whole_file import is_part
from policies.card import PolicyFileError
from policies.train.checkpoint import OLD, put_back
from policies.train.lessons import LESSONS
from policies.train.recipe import RECIPE_FILE

CHECKPOINTS: Final = "checkpoints"
BEST: Final = "best"
METRICS: Final = "metrics.jsonl"
TENSORBOARD: Final = "tensorboard"
SCORES: Final = "scores.json"


def check_new(folder: Path) -> None:
    """Raises PolicyFileError for a folder with something in it. What a recipe that was cut off left is nothing."""
    if folder.exists() and not all(map(is_part, folder.iterdir())):
        raise PolicyFileError(f"{folder} is not empty; choose another folder, or --resume what is in it")


def place_to_resume(folder: Path) -> Path | None:
    """The last checkpoint; None for a run that stopped before its first, of which then only the recipe is left.

    Raises PolicyFileError for a folder that holds no run, or one that has ended and has no checkpoint any more, in
    which nothing is touched; OSError.
    """
    put_back(folder / BEST)
    for old in (folder / CHECKPOINTS).glob(f"*{OLD}"):
        put_back(old.with_suffix(""))
    found = max((folder / CHECKPOINTS).glob("[0-9]*[0-9]"), default=None)
    if found is None:
        _clear(folder)
    return found


def _clear(folder: Path) -> None:
    if not (folder / RECIPE_FILE).is_file():
        raise PolicyFileError(f"{folder}: there is no checkpoint to resume from")
    if (folder / SCORES).exists():  # it got to its end: whoever took the checkpoints away still has the best model
        raise PolicyFileError(f"{folder}: this run has ended, its checkpoints are gone; {BEST} has what came of it")
    for name in (BEST, f"{BEST}.new", CHECKPOINTS, LESSONS, TENSORBOARD):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / METRICS).unlink(missing_ok=True)
