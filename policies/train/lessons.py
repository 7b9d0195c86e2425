"""What was tried in each round, as files in the run's folder: a run that is resumed learns from all of it again."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Final

import numpy as np

from policies.card import PolicyFileError
from policies.train.lookahead import Studied

LESSONS: Final = "lessons"
MAX_BYTES: Final = 512 << 20
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
        try:
            if path.stat().st_size > MAX_BYTES:
                raise PolicyFileError(f"{path}: larger than a round's lessons")
            with np.load(path, allow_pickle=False) as file:
                for index in range(len(file.files) // len(_ARRAYS)):
                    vectors, actions, worths = (file[f"{name}_{index}"] for name in _ARRAYS)
                    found.append(Studied(vectors[:0], vectors, actions, worths, {}))
        except OSError as error:
            raise PolicyFileError(f"{path}: {error.strerror or error}") from error
        except (ValueError, EOFError, KeyError, zipfile.BadZipFile, AttributeError) as error:
            raise PolicyFileError(f"{path}: no lessons: {str(error).splitlines()[0]:.200}") from error
    return found
