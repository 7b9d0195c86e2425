"""Which weights a figure belongs to. No torch."""

from __future__ import annotations

import hashlib
from pathlib import Path

from engine.models.folder import weight_files


def weights_digest(folder: Path) -> str:
    """Sha256 of a model folder's weight files, one after the other by name. EngineError where one is missing."""
    digest = hashlib.sha256()
    for path in weight_files(folder):
        with path.open("rb") as handle:
            while block := handle.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()
