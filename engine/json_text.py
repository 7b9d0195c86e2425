"""Documents from elsewhere (JSON, YAML), with one kind of error for whatever is wrong, and none too deep or too large
for what comes after.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Any, Final

MOST_DEEP: Final = 100
"""Lists and objects inside each other. Any document of ours has fewer than ten."""


def load_json(text: str | bytes, *, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """The value of a JSON text; ``pairs`` makes objects, of their keys and values in order.

    Raises ValueError, also for what is nested so deeply that whoever looks at it might run out of stack, which is
    neither refused nor a ValueError where ``json.loads`` is asked: it is not to be used (a lint rule).
    """
    try:
        value = json.loads(text, object_pairs_hook=pairs)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    opened = text.count("[") + text.count("{") if isinstance(text, str) else text.count(b"[") + text.count(b"{")
    if opened > MOST_DEEP and (why := objection(value)):
        raise ValueError(why)
    return value


def objection(
    value: object,
    most: int | None = None,
    *,
    kinds: type | tuple[type, ...] = (dict, list),
    inside: Callable[[Any], Collection[Any]] | None = None,
) -> str:
    """Why a document is not to be looked at; empty for one that may be. ``most``: values in it, each as often as it is
    referred to. ``kinds``: of values that hold others, which ``inside`` gives.

    A document that refers to its own parts, as YAML can, may be small and have no end, or more values than there is
    memory for: it is looked at level by level, every part once, with how often it occurs.
    """
    look = inside or _inside
    level: dict[int, tuple[Any, int]] = {id(value): (value, 1)}
    values = 1
    for _ in range(MOST_DEEP):
        below: dict[int, tuple[Any, int]] = {}
        for outer, times in level.values():
            parts = look(outer)
            values += times * len(parts)
            for inner in parts:
                if isinstance(inner, kinds):
                    below[id(inner)] = (inner, times + below.get(id(inner), (inner, 0))[1])
        if most is not None and values > most:
            return f"more than {most} values, counted as often as they are referred to"
        if not below:
            return ""
        level = below
    return "nested too deeply"


def _inside(value: Any) -> Collection[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
