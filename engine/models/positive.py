"""Numbers of a ``config.json``, which may hold anything that JSON can say, and NaN and infinity besides."""

from __future__ import annotations

import sys

from engine.errors import EngineError


def positive(what: str, value: object) -> float:
    """``value`` as a float. Raises EngineError naming ``what`` unless it is a number above 0 that a float can hold."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= sys.float_info.max:  # type: ignore[operator]  # a whole number has no end
        raise EngineError(f"config.json: {what} must be a positive number, got {value!r:.60}")
    return float(value)  # type: ignore[arg-type]
