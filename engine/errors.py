"""Errors that reach a user as one line."""

from __future__ import annotations


class EngineError(Exception):
    """Something a user can put right. ``str`` of it is one line that says what is wrong and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
