"""Text from elsewhere (reasons, writers, errors) made fit for one line of a terminal, a log or a status."""

from __future__ import annotations


def one_line(text: object, limit: int = 500) -> str:
    """``text`` on one line, without control characters, at most ``limit`` characters long."""
    line = " ".join("".join(character if character.isprintable() else " " for character in str(text)).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
