"""Text made fit for one line of a terminal, a log or a status: what comes from elsewhere, and times."""

from __future__ import annotations

import re
from typing import Final

_NUMBER: Final = re.compile(r"\[Errno -?\d+\] ")


def one_line(text: object, limit: int = 500) -> str:
    """``text`` on one line, without control characters, at most ``limit`` characters long."""
    line = " ".join("".join(character if character.isprintable() else " " for character in str(text)).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def rough_time(seconds: float) -> str:
    """A length of time for people, in the unit that suits it: ``50 s``, ``119 min``, ``2.0 h``."""
    whole = int(seconds)
    return f"{whole} s" if whole < 120 else f"{whole // 60} min" if whole < 7200 else f"{whole / 3600:.1f} h"


def trouble(error: object) -> str:
    """What went wrong in an error's own words, for people: without the system's number for it. Never empty.

    Of an error that wraps another (``urllib.error.URLError``) the inner one.
    """
    inner = getattr(error, "reason", None)
    error = inner if isinstance(inner, OSError | str) and inner else error
    words = error.strerror if isinstance(error, OSError) and isinstance(error.strerror, str) else str(error)
    return _NUMBER.sub("", words) or type(error).__name__
