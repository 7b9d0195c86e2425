"""Which model a figure belongs to. No torch."""

from __future__ import annotations

import hashlib
from pathlib import Path

from engine.models.folder import weight_files


def model_digest(folder: Path) -> str:
    """Sha256 of a model folder's config.json and weight files, one after the other by name.

    The configuration counts because another scaling of positions, say, makes another model of the same weights.
    Raises EngineError where a file is missing.
    """
    digest = hashlib.sha256()
    for path in (folder / "config.json", *weight_files(folder)):
        with path.open("rb") as handle:
            while block := handle.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()
