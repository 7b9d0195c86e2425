"""HTTP and event parsers: the same result however the bytes are cut."""

from __future__ import annotations

import pytest

from autotune.replay.client import token_count
from autotune.replay.wire import Endpoint, EventParser, ResponseParser, WireError

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"9;x=y\r\ndata: one\r\n4\r\n\n\nda\r\n0b\r\nta: two\r\n\r\n\r\n0\r\nTrailer: x\r\n\r\n"
)
LENGTH = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 404 Not Found\r\nContent-Length: 5\r\n\r\nhello"


@pytest.mark.parametrize("cut", range(1, len(CHUNKED)))
def test_a_chunked_stream_cut_anywhere(cut: int) -> None:
    parser, events = ResponseParser(), EventParser()
    found = [event for piece in (CHUNKED[:cut], CHUNKED[cut:]) for event in events.feed(parser.feed(piece))]
    assert found == [b"one", b"two"]
    assert (parser.status, parser.complete, parser.reusable) == (200, True, True)


@pytest.mark.parametrize("cut", range(1, len(LENGTH)))
def test_a_body_with_length_cut_anywhere(cut: int) -> None:
    parser = ResponseParser()
    assert parser.feed(LENGTH[:cut]) + parser.feed(LENGTH[cut:]) == b"hello"
    assert (parser.status, parser.complete) == (404, True)


def test_a_body_until_close_ends_with_the_connection() -> None:
    parser = ResponseParser()
    assert parser.feed(b"HTTP/1.0 200 OK\r\n\r\nabc") == b"abc"
    assert not parser.complete
    assert parser.end()
    assert not parser.reusable


def test_a_cut_off_answer_is_not_whole() -> None:
    parser = ResponseParser()
    parser.feed(CHUNKED[:-10])
    assert not parser.end()


@pytest.mark.parametrize(
    "data", [b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 abc\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n"]
)
def test_what_is_not_http_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        ResponseParser().feed(data)


def test_close_is_respected() -> None:
    parser = ResponseParser()
    parser.feed(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
    assert parser.complete
    assert not parser.reusable


def test_events_with_comments_and_several_data_lines() -> None:
    assert EventParser().feed(b": ping\r\n\r\nevent: x\r\ndata:a\r\ndata: b\r\n\r\ndata: c\n") == [b"a\nb"]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://localhost:8000", Endpoint("localhost", 8000, tls=False, base="")),
        ("localhost:8000/v1/", Endpoint("localhost", 8000, tls=False, base="")),
        ("https://host/api/v1", Endpoint("host", 443, tls=True, base="/api")),
        ("http://[::1]:80", Endpoint("::1", 80, tls=False, base="")),
    ],
)
def test_addresses(url: str, expected: Endpoint) -> None:
    assert Endpoint.parse(url) == expected


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://host:99999", "http://host:abc"])
def test_bad_addresses_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="not the address of a server"):
        Endpoint.parse(url)


def test_headers_cannot_be_smuggled() -> None:
    with pytest.raises(ValueError, match="line break"):
        Endpoint.parse("http://x").request("GET", "/", b"", (("A", "b\r\nC: d"),))


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 \xb200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: \xb2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
        *(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + size + b"\r\nab\r\n"
            for size in (b"-5", b"+5", b"0x5", b"1_0", b"", b"\xb2", b"f" * 5000)
        ),
    ],
)
def test_sizes_that_are_none_are_refused(data: bytes) -> None:
    """A negative one would have been waited for for ever."""
    with pytest.raises(WireError):
        ResponseParser().feed(data)


@pytest.mark.parametrize(("told", "count"), [(0, 0), (7, 7), (-1, None), (True, None), (10**18, None), ("7", None)])
def test_numbers_of_tokens_that_cannot_be_are_not_told(told: object, count: int | None) -> None:
    """A foolish server's count once decided how long a list was made."""
    assert token_count(told) == count
