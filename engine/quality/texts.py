"""Text to score: a file or a folder of files. No torch."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from engine.detokenizer import REPLACEMENT
from engine.errors import EngineError

# The novel that the bundled model never saw (engine/bundled/README.md).
HELD_OUT = "austen_pride_and_prejudice"
_SUFFIXES = (".txt", ".txt.gz")
_MOST_REPLACED = 0.1  # of the characters; a few bad bytes in a book are nothing


def read_text(path: Path, held_out: str | None = None) -> tuple[str, str]:
    """Name and content of what ``path`` holds: a file itself; of a folder, the .txt and .txt.gz files whose names begin
    with ``held_out``. Where that is not said, those of ``HELD_OUT``, or all.

    Raises EngineError where there is nothing to read, or what is there is no text.
    """
    files = [path] if path.is_file() else _texts(path, held_out)
    try:
        parts = [_content(file) for file in files]
    except (OSError, EOFError, zlib.error) as error:
        raise EngineError(f"{path}: a text cannot be read: {error}") from error
    name, content = ", ".join(file.name for file in files), "\n".join(parts)
    if not content.strip():
        raise EngineError(f"{path}: there is no text in it")
    if content.count(REPLACEMENT) > _MOST_REPLACED * len(content):
        raise EngineError(f"{path}: that is no UTF-8 text")
    return name, content


def _texts(folder: Path, held_out: str | None) -> list[Path]:
    if not folder.is_dir():
        raise EngineError(f"{folder}: no such file or folder; give one with texts (.txt or .txt.gz)")
    files = sorted(file for file in folder.iterdir() if file.is_file() and file.name.endswith(_SUFFIXES))
    if not files:
        raise EngineError(f"{folder} holds no text (.txt or .txt.gz)")
    chosen = [file for file in files if file.name.startswith(HELD_OUT if held_out is None else held_out)]
    if not chosen and held_out is not None:
        raise EngineError(f"{folder}: no text whose name begins with {held_out!r}; there are {_some(files)}")
    return chosen or files


def _some(files: list[Path]) -> str:
    return ", ".join(file.name for file in files[:5]) + (" ..." if len(files) > 5 else "")


def _content(file: Path) -> str:
    data = file.read_bytes()
    return (gzip.decompress(data) if file.suffix == ".gz" else data).decode("utf-8", errors="replace")
