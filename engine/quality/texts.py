"""Text to score: a file or a folder of files. No torch."""

from __future__ import annotations

import gzip
from pathlib import Path

from engine.errors import EngineError

# The novel that the bundled model never saw (engine/bundled/README.md).
HELD_OUT = "austen_pride_and_prejudice"
_SUFFIXES = (".txt", ".txt.gz")


def read_text(path: Path, held_out: str = HELD_OUT) -> tuple[str, str]:
    """Name and content of what ``path`` holds: a file itself; of a folder, the .txt and .txt.gz files whose names begin
    with ``held_out``, or all where none does.

    Raises EngineError where there is nothing to read.
    """
    files = [path] if path.is_file() else _texts(path, held_out)
    try:
        parts = [_content(file) for file in files]
    except (OSError, EOFError) as error:
        raise EngineError(f"{path}: a text cannot be read: {error}") from error
    return ", ".join(file.name for file in files), "\n".join(parts)


def _texts(folder: Path, held_out: str) -> list[Path]:
    if not folder.is_dir():
        raise EngineError(f"{folder}: no such file or folder; give one with texts (.txt or .txt.gz)")
    files = sorted(file for file in folder.iterdir() if file.is_file() and file.name.endswith(_SUFFIXES))
    if not files:
        raise EngineError(f"{folder} holds no text (.txt or .txt.gz)")
    return [file for file in files if file.name.startswith(held_out)] or files


def _content(file: Path) -> str:
    data = file.read_bytes()
    return (gzip.decompress(data) if file.suffix == ".gz" else data).decode("utf-8", errors="replace")
