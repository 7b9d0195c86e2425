"""Documents from elsewhere: refused with one kind of error, and never too deep or too large for what comes after."""

from __future__ import annotations

from typing import Any

import pytest

from engine.json_text import MOST_DEEP, load_json, objection
from engine.yaml_text import YamlError, load_yaml


def brackets(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize("depth", [MOST_DEEP + 1, 500, 900, 100_000])
def test_what_is_nested_too_deeply_is_refused_like_anything_that_is_no_json(depth: int) -> None:
    """Some of it can be read, and nothing that looks at it afterwards can go down as far."""
    for text in (brackets(depth), brackets(depth).encode(), '{"a":' * depth + "1" + "}" * depth):
        with pytest.raises(ValueError, match="deep"):
            load_json(text)
    with pytest.raises(YamlError, match="deep"):
        load_yaml(brackets(min(depth, 3000)))


def test_what_is_deep_enough_or_only_long_is_taken() -> None:
    assert str(load_json(brackets(MOST_DEEP))) == brackets(MOST_DEEP)
    assert len(load_json("[" + ",".join(["[]"] * 1000) + "]")) == 1000
    assert load_json('"' + "[" * 1000 + '"') == "[" * 1000
    assert load_json('{"a": 1, "b": 2}', pairs=lambda found: found) == [("a", 1), ("b", 2)]


@pytest.mark.parametrize("text", ["", "{", "nul", b"\xff", "9" * 5000])
def test_what_is_no_json_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # whatever it says
        load_json(text)


def test_shared_parts_count_as_often_as_they_are_referred_to() -> None:
    part: Any = ["x"] * 10
    for _ in range(5):
        part = [part] * 10
    assert objection(part) == ""
    assert "more than 1000 values" in objection(part, 1000)
    assert objection(part, 2_000_000) == ""
    part.append(part)
    assert objection(part) == "nested too deeply"


LAUGHS = "- &l0 [ha, ha]\n" + "".join(f"- &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]\n" for n in range(1, 12))
MERGES = "l0: &l0 {a: 1, b: 2}\n" + "".join(
    f"l{n}: &l{n} {{<<: [{', '.join([f'*l{n - 1}'] * 10)}]}}\n" for n in range(1, 12)
)


@pytest.mark.parametrize("text", [LAUGHS, MERGES, "&a [*a]", "&a {b: *a}", "&m {<<: *m}"])
def test_yaml_that_would_fill_all_memory_is_refused_before_it_does(text: str) -> None:
    with pytest.raises(YamlError) as caught:
        load_yaml(text)
    assert "\n" not in str(caught.value)


def test_yaml_says_where_and_what() -> None:
    with pytest.raises(YamlError) as caught:
        load_yaml("a: 1\nb: [")
    assert caught.value.where.startswith(" at line ")
    assert caught.value.what
    assert load_yaml("a: &x [1]\nb: *x") == {"a": [1], "b": [1]}
    assert load_yaml("") is None
    for text in ("2026-13-45", "\0", "a\n---\nb", "!!python/object/apply:os.system [id]"):
        with pytest.raises(YamlError) as caught:
            load_yaml(text)
        assert "\n" not in str(caught.value)
