"""Whether a document has the shape that its type declares."""

from __future__ import annotations

from typing import Any, TypedDict

import pytest

from engine.shapes import fits


class Inner(TypedDict):
    value: str | int


class Outer(TypedDict):
    names: dict[str, Inner]
    rows: list[float]
    last: float | None


GOOD = {"names": {"a": {"value": "x"}, "b": {"value": 3, "more": []}}, "rows": [1, 0.5], "last": None}


def test_what_has_the_shape_fits() -> None:
    assert fits(GOOD, Outer)
    assert fits({**GOOD, "more": 1, "last": 2}, Outer)
    assert fits(object(), Any)


@pytest.mark.parametrize(
    "change",
    [
        {"names": []},
        {"names": {"a": {}}},
        {"names": {"a": {"value": None}}},
        {"names": {"a": {"value": True}}},
        {"names": {"a": {"value": 2**64}}},
        {"rows": None},
        {"rows": [1, "2"]},
        {"rows": [float("nan")]},
        {"rows": [10**400]},
        {"last": "x"},
        {"last": float("inf")},
    ],
)
def test_what_has_not_does_not(change: dict[str, Any]) -> None:
    assert not fits({**GOOD, **change}, Outer)


@pytest.mark.parametrize("value", [None, [], "x", {}, {"names": {}}])
def test_what_is_something_else_does_not_either(value: Any) -> None:
    assert not fits(value, Outer)
