"""Good documents and bytes made bad, and what a refusal has to look like."""

from __future__ import annotations

import copy
import json
import os
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any, Final

import yaml
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

_USUAL: Final = 60


def examples(usual: int = _USUAL) -> settings:
    """``usual`` examples of a test, of which the suite takes a third; ``FUZZ_EXAMPLES`` says how many one has that
    usually has 60.
    """
    asked = int(os.environ.get("FUZZ_EXAMPLES", str(_USUAL // 3)))
    return settings(
        max_examples=max(1, usual * asked // _USUAL),
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )


def nested(depth: int) -> Any:
    """A list in a list in a list."""
    result: Any = []
    for _ in range(depth - 1):
        result = [result]
    return result


# What is only written down, as words that :func:`as_json` and :func:`as_yaml` replace: nothing here could carry it.
_ABYSS: Final = "SO DEEP"
"""Deeper than any reader can follow."""
_SHAFT: Final = "ABOUT SO DEEP "
"""Just as deep as a reader can follow, less the number behind it: what looks at it later may not be able to."""
_TRICK: Final = "TRICK "
# What YAML has and JSON has not: a document that holds itself, one that is small on disk and huge in memory, and so on.
_TRICKS: Final = (
    "&self [1, *self]",
    "[&l0 [ha, ha], " + ", ".join(f"&l{n} [{', '.join([f'*l{n - 1}'] * 8)}]" for n in range(1, 8)) + "]",
    "{? &m0 [a, a] : b, c: {<<: *m0}}",
    "&m {<<: *m}",
    "2026-13-45",
    "!!python/object/apply:os.system [id]",
    "!!binary '='",
    "!!timestamp x",
    "!!set {a, b}",
    "!!omap [a: 1]",
    "0o9",
    "1:99999999999999999999",
    ".inf",
    "~",
    "!!float x",
    "!!int 0x",
)
NASTY = st.one_of(
    st.none(), st.booleans(), st.integers(), st.sampled_from([0, -1, 2**31, 2**63, 2**64, 10**400, -(10**400)]),
    st.floats(), st.sampled_from([1e308, -1e308, 5e-324]),
    st.sampled_from(["", "\0", "\ud800", "a\nb", "!!python/object/apply:os.system [id]", "$HOME", "1e999", "²",
                     "../../etc/passwd", "nan", "-1", _ABYSS]),
    st.integers(0, 60).map(lambda less: f"{_SHAFT}{less}"),
    st.sampled_from(range(len(_TRICKS))).map(lambda n: f"{_TRICK}{n}"),
    st.text(max_size=20), st.binary(max_size=8).map(repr), st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=3),
    st.sampled_from([nested(6), nested(90), {"a": {"b": {}}}, [[]], [{}], [None]]),
)  # fmt: skip


def places(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something may be put."""
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(document, dict):
        inner = document.items()
    elif isinstance(document, list):
        inner = enumerate(document)
    return [path, *(place for key, value in inner for place in places(value, (*path, key)))]


@st.composite
def mangled(draw: Callable[..., Any], document: Any) -> Any:
    """The document with one to four of its parts replaced, taken out, doubled or put under another name."""
    result = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 4))):
        path = draw(st.sampled_from(places(result)))
        if not path:
            continue
        parent = result
        for key in path[:-1]:
            parent = parent[key]
        how = draw(st.sampled_from(["replace", "replace", "replace", "remove", "rename", "swap"]))
        if how == "replace":
            parent[path[-1]] = copy.deepcopy(draw(NASTY))
        elif how == "remove":
            del parent[path[-1]]
        elif how == "rename" and isinstance(parent, dict):
            parent[draw(st.text(max_size=10))] = parent.pop(path[-1])
        elif how == "swap":
            parent[path[-1]] = copy.deepcopy(draw(st.sampled_from([document, parent])))
    return result


@st.composite
def bitten(draw: Callable[..., Any], data: bytes) -> bytes:
    """The bytes with a few of them changed, cut off, doubled or put in."""
    result = bytearray(data)
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, max(0, len(result) - 1)))
        how = draw(st.sampled_from(["set", "cut", "insert", "double"]))
        if how == "set" and result:
            result[at] = draw(st.integers(0, 255))
        elif how == "cut":
            del result[at : at + draw(st.integers(1, 64))]
        elif how == "insert":
            result[at:at] = draw(st.binary(max_size=16))
        else:
            result[at:at] = result[at : at + 64]
    return bytes(result)


def as_json(document: Any) -> bytes:
    """The text of a mangled document; lone surrogates stay escapes, as JSON may have them."""
    text = re.sub(f'"{_TRICK}\\d+"', '"trick"', json.dumps(document, default=str))
    text = text.replace(f'"{_ABYSS}"', _brackets(100_000))
    text = re.sub(f'"{_SHAFT}(\\d+)"', lambda found: _brackets(_room() - int(found[1])), text)
    return text.encode()


def as_yaml(document: Any) -> str:
    """The same as YAML; what cannot be written down as YAML is written as JSON."""
    try:
        text = yaml.safe_dump(document, allow_unicode=True)
    except (yaml.YAMLError, ValueError, RecursionError):
        text = json.dumps(document, default=str)
    text = text.replace(_ABYSS, _brackets(100_000))
    text = re.sub(f"{_SHAFT}(\\d+)", lambda found: _brackets(max(1, _room() // 3 - int(found[1]))), text)
    return re.sub(f"{_TRICK}(\\d+)", lambda found: _TRICKS[int(found[1])], text)


def one_line_each(problems: list[str]) -> None:
    """Of a refusal: it says something, line by line, and not without end."""
    assert problems
    assert all(problem.strip() and "\n" not in problem and len(problem) < 3000 for problem in problems), problems


def _brackets(depth: int) -> str:
    return "[" * depth + "]" * depth


def _room() -> int:
    """How many more frames may be entered here."""
    frame, depth = sys._getframe(), 0
    while frame.f_back is not None:
        frame, depth = frame.f_back, depth + 1
    return sys.getrecursionlimit() - depth


_FIGURES = st.sampled_from(
    ["NaN", "+Inf", "-Inf", "-1", "0", "1e308", "1.7e308", "1e400", "5e-324", "9" * 400, "0x10", "1_0", "", "x", "²",
     "1 1700000000", '1e308 # {a="b"} 1e308']
)  # fmt: skip
_LABELS = st.sampled_from(
    [
     "", "{", "{}", '{engine="1"}', '{engine="\\"}', '{le="NaN"}', '{le="1e308"}', '{le="-1"}', '{le="+Inf"}',
     '{le="x"}', '{a="b",a="c"}', '{engine="0",le="0.1"}', '{model_name="\\n\x1b[31m"}', '{engine="' + "x" * 300 + '"}']
)  # fmt: skip


@st.composite
def mangled_page(draw: Callable[..., Any], text: str) -> bytes:
    """A page of figures with a few of its lines changed, doubled, moved or taken out."""
    lines = text.splitlines()
    for _ in range(draw(st.integers(1, 8))):
        at = draw(st.integers(0, len(lines) - 1))
        name, _, figure = lines[at].rpartition(" ")
        how = draw(st.sampled_from(["figure", "figure", "labels", "double", "remove", "move", "text"]))
        if how == "figure":
            lines[at] = f"{name} {draw(_FIGURES)}"
        elif how == "labels":
            lines[at] = f"{name.partition('{')[0]}{draw(_LABELS)} {figure}"
        elif how == "double":
            lines.insert(at, f"{name} {draw(_FIGURES)}")
        elif how == "remove" and len(lines) > 1:
            del lines[at]
        elif how == "move":
            lines.append(lines.pop(at))
        elif how == "text":
            lines[at] = draw(st.text(max_size=30))
    return "\n".join(lines).encode("utf-8", "surrogatepass") + b"\n"
