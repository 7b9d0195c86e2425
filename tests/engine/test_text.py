"""Errors in words: without the system's numbers, never empty."""

from __future__ import annotations

import errno
import urllib.error
from http.client import IncompleteRead

import pytest

from engine.text import trouble


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "/x"), "No such file or directory"),
        (urllib.error.URLError(ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")), "Connection refused"),
        (urllib.error.URLError("no host given"), "no host given"),
        (
            OSError("Multiple exceptions: [Errno 111] refused, [Errno -2] unknown"),
            "Multiple exceptions: refused, unknown",
        ),
        (RuntimeError("[Errno 111] Connection refused"), "Connection refused"),
        (TimeoutError(), "TimeoutError"),
        (ValueError("embedded null byte"), "embedded null byte"),
        (IncompleteRead(b""), "IncompleteRead(0 bytes read)"),
    ],
)
def test_trouble_is_told_in_words(error: Exception, words: str) -> None:
    assert trouble(error) == words
