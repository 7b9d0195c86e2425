"""What was tried in each round, as files in the run's folder: a run that is resumed learns from all of it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np

from policies.card import PolicyFileError
from policies.train.arrays import read_arrays
from policies.train.lookahead import Studied

LESSONS: Final = "lessons"
_ARRAYS: Final = ("vectors", "actions", "worths")


def write_lessons(folder: Path, number: int, studied: list[Studied]) -> None:
    """A round's, one file. Raises OSError."""
    arrays = {f"{name}_{index}": getattr(one, name) for index, one in enumerate(studied) for name in _ARRAYS}
    place = folder / LESSONS
    place.mkdir(exist_ok=True)
    made = place / f"{number:06d}.new.npz"
    np.savez(made, **arrays)
    made.rename(place / f"{number:06d}.npz")


def read_lessons(folder: Path, rounds: int) -> list[Studied]:
    """Of the first ``rounds`` rounds, in order. Raises PolicyFileError for files that are missing or none of them."""
    found: list[Studied] = []
    for number in range(rounds):
        path = folder / LESSONS / f"{number:06d}.npz"
        arrays = read_arrays(path)
        episodes = [_episode(arrays, index) for index in range(len(arrays) // len(_ARRAYS))]
        if not episodes or None in episodes:
            raise PolicyFileError(f"{path}: no lessons of a round; begin the run anew in another folder")
        found += [episode for episode in episodes if episode is not None]
    return found


def _episode(arrays: dict[str, np.ndarray[Any, Any]], index: int) -> Studied | None:
    """None where something is missing or does not go together."""
    vectors, actions, worths = (arrays.get(f"{name}_{index}", np.empty(0)) for name in _ARRAYS)
    if vectors.ndim != 2 or actions.ndim != 2 or worths.shape != actions.shape or len(vectors) != len(actions):
        return None
    if (vectors.dtype, actions.dtype, worths.dtype) != (np.float32, np.int64, np.float64):
        return None
    return Studied(vectors[:0], vectors, actions, worths, {})
