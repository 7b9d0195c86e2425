"""Properties are checked without a bound on time, whether a test says so itself or not."""

from __future__ import annotations

from hypothesis import settings


def test_examples_have_no_deadline() -> None:
    assert settings.default is not None
    assert settings.default.deadline is None
    assert settings(max_examples=3).deadline is None
