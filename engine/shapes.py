"""Whether a document from elsewhere has the shape that its type declares. Stdlib only: the daemon asks all the time."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final, Union, get_args, get_origin, get_type_hints, is_typeddict

_LARGEST: Final = 2**63


def fits(value: object, kind: Any) -> bool:
    """Whether a value of JSON is of a type: one of JSON's own, ``dict``, ``list`` and unions of them with arguments, or
    a TypedDict, whose keys must all be there and may have others beside them.

    A number that is not finite, or a whole one beyond 64 bits, is none.
    """
    if kind is Any:
        return True
    if is_typeddict(kind):
        return isinstance(value, dict) and all(
            name in value and fits(value[name], inner) for name, inner in _hints(kind).items()
        )
    origin, inner = get_origin(kind), get_args(kind)
    if origin in {Union, types.UnionType}:
        return any(fits(value, one) for one in inner)
    if origin is dict:
        return isinstance(value, dict) and all(
            fits(key, inner[0]) and fits(one, inner[1]) for key, one in value.items()
        )
    if origin is list:
        return isinstance(value, list) and all(fits(one, inner[0]) for one in value)
    if kind in {int, float}:
        is_one = isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LARGEST
        return is_one or (kind is float and isinstance(value, float) and math.isfinite(value))
    return isinstance(value, kind)


@lru_cache
def _hints(kind: Any) -> Mapping[str, Any]:
    return get_type_hints(kind)
