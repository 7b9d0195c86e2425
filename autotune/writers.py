"""Names under which knobs are written, and what they mean: the daemon and the command line share them."""

from __future__ import annotations

import re
from typing import Final

OWN_WRITER: Final = "autotune"
STARTUP_WRITER: Final = "startup"
"""The engine's word for a value that nobody has written since it started."""
OPERATOR_PREFIX: Final = "operator:"
RELEASE_PREFIX: Final = "release:"
"""A knob written under such a name belongs to the daemon again, whoever had it before."""
_PINNED: Final = re.compile(r"(?P<who>.*);until=(?P<until>[0-9]{1,12})")
_MAX_NAME_CHARS: Final = 40  # with prefix and time it fits the 64 that the control API takes


def pinned_by(writer: str, until_ns: int) -> str:
    """The name under which ``writer`` pins a knob until then, nanoseconds of the machine's monotonic clock.

    The engine keeps it with the value, so a pin survives the daemon and ends with the engine.
    """
    return f"{writer[:_MAX_NAME_CHARS]};until={until_ns // 1_000_000_000}"


def has_ended(writer: str, now_ns: int) -> bool:
    """Whether a pin's time is over; False for a name that is no pin."""
    found = _PINNED.fullmatch(writer)
    return found is not None and now_ns >= int(found["until"]) * 1_000_000_000


def named(writer: str, now_ns: int) -> str:
    """A writer for people: a pin's name with the time that is left of it."""
    found = _PINNED.fullmatch(writer)
    if found is None:
        return writer
    left_s = max(0, int(found["until"]) - now_ns // 1_000_000_000)
    left = f"{left_s} s" if left_s < 120 else f"{left_s // 60} min" if left_s < 7200 else f"{left_s / 3600:.1f} h"
    return f"{found['who']} for another {left}"


def who_of(writer: str) -> str:
    """A writer without a pin's time."""
    found = _PINNED.fullmatch(writer)
    return writer if found is None else found["who"]
