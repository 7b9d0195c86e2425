from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.detokenizer import REPLACEMENT, ByteDetokenizer, Detokenizer, WindowDetokenizer

TEXTS = [
    "héllo",
    "日本語のテキスト",
    "👩\u200d👩\u200d👧 family 🇫🇷",
    "e\u0301\u0327 combining",
    "plain",
    "\U0001f600" * 3,
    "\u00a0\u2028",
]


def all_splits(data: bytes) -> list[list[bytes]]:
    """Every way to cut ``data`` into two tokens, and the cut into single bytes."""
    return [[data[:cut], data[cut:]] for cut in range(1, len(data))] + [[data[i : i + 1] for i in range(len(data))]]


def both(pieces: Sequence[bytes]) -> list[Detokenizer]:
    def decode(ids: Sequence[int]) -> str:
        return b"".join(pieces[i] for i in ids).decode("utf-8", "replace")

    return [ByteDetokenizer(pieces.__getitem__), WindowDetokenizer(decode)]


@pytest.mark.parametrize("text", TEXTS)
def test_every_split_point_gives_the_text_and_no_replacement(text: str) -> None:
    for pieces in all_splits(text.encode()):
        for detokenizer in both(pieces):
            deltas = [detokenizer.feed(i) for i in range(len(pieces))]
            assert "".join(deltas) + detokenizer.flush() == text, (pieces, type(detokenizer))
            assert not any(REPLACEMENT in delta for delta in deltas)


def test_a_finished_character_is_not_held_back() -> None:
    pieces = [b"a", "é".encode()[:1], "é".encode()[1:], b"b"]
    for detokenizer in both(pieces):
        assert [detokenizer.feed(i) for i in range(4)] == ["a", "", "é", "b"]


def test_end_of_stream_inside_a_character_gives_one_replacement() -> None:
    pieces = [b"ok", "👩".encode()[:2]]
    for detokenizer in both(pieces):
        assert [detokenizer.feed(0), detokenizer.feed(1)] == ["ok", ""]
        assert detokenizer.flush() == REPLACEMENT
        assert detokenizer.flush() == ""


@given(data=st.binary(max_size=24), cuts=st.lists(st.integers(0, 24), max_size=6))
def test_invalid_bytes_decode_like_the_whole_and_never_raise(data: bytes, cuts: list[int]) -> None:
    edges = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    pieces = [data[a:b] for a, b in itertools.pairwise(edges)]
    detokenizer = ByteDetokenizer(pieces.__getitem__)
    text = "".join(detokenizer.feed(i) for i in range(len(pieces))) + detokenizer.flush()
    assert text == data.decode("utf-8", "replace")


@example(data=b"\x80\x80\x80\x80\xc2\x80")
@given(data=st.binary(max_size=24))
def test_the_window_never_raises_and_keeps_the_good_text(data: bytes) -> None:
    pieces = [data[i : i + 1] for i in range(len(data))]
    detokenizer = both(pieces)[1]
    text = "".join(detokenizer.feed(i) for i in range(len(pieces))) + detokenizer.flush()
    assert text.replace(REPLACEMENT, "") == data.decode("utf-8", "replace").replace(REPLACEMENT, "")


def test_a_bad_byte_does_not_hold_the_stream_back_for_ever() -> None:
    pieces = [b"\xff"] * 12 + [b"a"]
    for detokenizer in both(pieces):
        deltas = [detokenizer.feed(i) for i in range(13)]
        assert sum(len(delta) for delta in deltas[:12]) >= 8
        assert deltas[12].endswith("a")


def test_special_tokens_between_the_bytes_of_a_character_do_not_break_it() -> None:
    pieces = [b"\xe4\xb8", b"", b"\xad"]
    detokenizer = ByteDetokenizer(pieces.__getitem__)
    assert [detokenizer.feed(i) for i in range(3)] == ["", "", "中"]


def test_one_leading_space_is_stripped_once() -> None:
    pieces = [b"", b"  a", b" b"]
    detokenizer = ByteDetokenizer(pieces.__getitem__, strip_leading_space=True)
    assert [detokenizer.feed(i) for i in range(3)] == ["", " a", " b"]
