from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.stop_strings import StopStrings


def run(stops: Sequence[str], deltas: Iterable[str], *, include: bool = False) -> tuple[list[str], str | None]:
    matcher = StopStrings(stops, include=include)
    out = []
    for delta in deltas:
        out.append(matcher.feed(delta))
        if matcher.matched:
            break
    out.append(matcher.flush())
    return out, matcher.matched


def oracle(stops: Sequence[str], text: str) -> tuple[str, str | None]:
    """Looks at every prefix of the whole text in turn: the definition, without any holding back."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_no_piece_of_a_stop_leaves_before_the_match() -> None:
    out, matched = run(["DEFGHIJ"], ["ABC", "DEF", "G", "HI", "J", "KLM"])
    assert out == ["ABC", "", "", "", "", ""]
    assert matched == "DEFGHIJ"


def test_a_false_start_is_released_as_soon_as_it_is_one() -> None:
    out, matched = run(["DEFGHIJ"], ["DEF", "X", "Y"])
    assert out == ["", "DEFX", "Y", ""]
    assert matched is None


def test_a_false_start_at_the_end_is_released_by_flush() -> None:
    out, matched = run(["DEFGHIJ"], ["aDEF"])
    assert out == ["a", "DEF"]
    assert matched is None


def test_overlapping_stops_the_one_complete_first_wins() -> None:
    assert run(["ABCD", "BC"], ["xAB", "CD"]) == (["x", "A", ""], "BC")
    assert run(["BCD", "ABCD"], ["xABCD"]) == (["x", ""], "ABCD")
    assert run(["END", "ND!"], ["EN", "D!"]) == (["", "", ""], "END")


def test_a_false_start_may_hide_a_real_one() -> None:
    assert run(["aab"], ["a", "a", "a", "b"])[0] == ["", "", "a", "", ""]


def test_included_stop_leaves_with_the_text() -> None:
    out, matched = run(["STOP"], ["go ST", "OP on"], include=True)
    assert "".join(out) == "go STOP"
    assert matched == "STOP"


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["ok", ""])


@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
def test_any_cutting_gives_what_the_whole_text_gives(text: str, stops: list[str], cuts: list[int]) -> None:
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    deltas = [text[a:b] for a, b in itertools.pairwise(edges)]
    out, matched = run(stops, deltas)
    assert ("".join(out), matched) == oracle(stops, text)
