"""Arrays of numbers out of an npz file that may be damaged, or be another file."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any, Final

import numpy as np

from policies.card import PolicyFileError

MAX_BYTES: Final = 512 << 20
"""Of all arrays of a file, unpacked."""


def read_arrays(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """By name. Raises PolicyFileError, one line; an array of objects would be a pickle and is refused."""
    try:
        with zipfile.ZipFile(path) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > MAX_BYTES:
                raise PolicyFileError(f"{path}: more than the {MAX_BYTES} bytes that a run needs")
        with np.load(path, allow_pickle=False) as file:
            return {name: np.asarray(file[name]) for name in file.files}
    except OSError as error:
        raise PolicyFileError(f"{path}: {error.strerror or error}") from error
    except (
        ValueError, EOFError, KeyError, TypeError, AttributeError, MemoryError, NotImplementedError, RuntimeError,
        zipfile.BadZipFile, zlib.error,
    ) as error:  # fmt: skip
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise PolicyFileError(f"{path}: no arrays of numbers: {why}") from error
