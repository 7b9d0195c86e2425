"""The servers that the fuzzer puts before and behind the product."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest
from canned import Canned, Forward, ok


def asked(url: str, body: bytes | None = None) -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=20) as answer:
        return bytes(answer.read())


def test_a_port_leads_to_a_unix_socket_and_back(tmp_path: Path) -> None:
    with Canned(tmp_path / "s") as far, Forward(tmp_path / "s") as near:
        far.reply = lambda method, path, body: ok(f"{method} {path} ".encode() + body)
        assert far.url == ""
        assert asked(f"{near.url}/a?b=1") == b"GET /a?b=1 "
        long = b"x" * 1_000_000
        assert asked(f"{near.url}/c", long) == b"POST /c " + long


def test_a_port_that_leads_nowhere_closes(tmp_path: Path) -> None:
    with Forward(tmp_path / "none") as near, pytest.raises(OSError, match=r"."):
        asked(near.url)
