"""Byte sizes as people write them. Stdlib only."""

from __future__ import annotations

import math
import re

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)(b?)\s*", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str | int) -> int:
    """Bytes of ``64M``, ``64MiB`` (both 64 · 2**20), ``64MB`` (64 · 10**6), ``1.5G`` or a plain number.

    Raises ValueError for anything else, for less than one byte, and for more digits than a float can take.
    """
    match = _SIZE.fullmatch(str(text))
    if match is None:
        raise ValueError(f"{text!r} is not a size; write bytes or a number with K, M, G or T, like 64M")
    number, unit, binary, byte = match.groups()
    base = 1000 if byte and not binary and unit else 1024
    exact = float(number) * base ** _POWERS[unit.lower()]
    if exact == math.inf:
        raise ValueError(f"a size of {len(number)} digits is beyond any machine")
    size = int(exact)
    if size < 1:
        raise ValueError(f"a size must be at least one byte, got {text!r}")
    return size


def format_size(size: float) -> str:
    """Bytes in the largest binary unit below them, like ``64.0 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
