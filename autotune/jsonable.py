"""Making values fit for JSON, where NaN and infinities do not exist: unknown is null."""

from __future__ import annotations

import math
from collections.abc import Mapping


def finite(value: object) -> object:
    """``value`` with non-finite floats replaced by None, mappings and sequences rebuilt as dict and list."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
