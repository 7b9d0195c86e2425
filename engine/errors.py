"""Errors that reach a user as one line."""

from __future__ import annotations


class EngineError(Exception):
    """Something a user can put right. ``str`` of it is one line that says what is wrong and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class ConfigurationError(EngineError):
    """What an engine was told to do is wrong before it has begun: starting it again cannot help."""


EXIT_CONFIGURATION = 2
"""Exit code of an engine after a ConfigurationError; a supervisor does not start it again."""
