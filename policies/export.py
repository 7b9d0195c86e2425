"""Writing an exported policy: a folder with a card and weights, complete or not there at all. No torch."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from safetensors.numpy import save

from policies.card import CARD_FILE, WEIGHTS_FILE, Card, PolicyFileError, Tensors, card_text, check_tensors, read_policy

__all__ = ["export_policy"]


def export_policy(folder: Path, card: Card, tensors: Tensors) -> Card:
    """Write a policy and read it back. Returns the card as written, with the digest of the weights.

    A folder is complete or not there: it is made beside and renamed. An earlier policy in ``folder`` is moved away just
    before; anything else there is refused and left alone. Raises PolicyFileError for that and for a card that this
    program itself could not run, OSError.
    """
    check_tensors(tensors, card.network, str(folder))
    _check_replaceable(folder)
    data = save(tensors)
    card = card.model_copy(update={"sha256": hashlib.sha256(data).hexdigest()})
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as temporary:
        made = Path(temporary) / "new"
        made.mkdir()
        _write(made / WEIGHTS_FILE, data)
        _write(made / CARD_FILE, card_text(card).encode())
        read_policy(made)
        if folder.exists():
            folder.rename(Path(temporary) / "old")
        made.rename(folder)
    return card


def _check_replaceable(folder: Path) -> None:
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise PolicyFileError(f"{folder} is there and is no folder; choose another place")
    if not folder.exists():
        return
    inside = {entry.name for entry in folder.iterdir()}
    if inside and (inside != {CARD_FILE, WEIGHTS_FILE} or not _says_policy(folder / CARD_FILE)):
        raise PolicyFileError(f"{folder} holds something that is no policy; it is not overwritten")


def _says_policy(card: Path) -> bool:
    """Of any version: an outdated policy may be replaced as well."""
    with card.open("rb") as file:
        return b'"kv-autotune policy"' in file.read(200)


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
