"""Names under which knobs are written, and what they mean: the daemon and the command line share them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

from engine.text import rough_time

OWN_WRITER: Final = "autotune"
STARTUP_WRITER: Final = "startup"
"""The engine's word for a value that nobody has written since it started."""
OPERATOR_PREFIX: Final = "operator:"
RELEASE_PREFIX: Final = "release:"
"""A knob written under such a name belongs to the daemon again, whoever had it before."""
_PINNED: Final = re.compile(r"(?P<who>(?!(?:autotune|startup);).*);until=(?P<until>[0-9]{1,12})")
_MAX_NAME_CHARS: Final = 40  # with prefix and time it fits the 64 that the control API takes
LONGEST_PIN_S: Final = 30 * 86400.0
_DAY_NS: Final = 86_400_000_000_000


def pinned_by(writer: str, until_ns: int) -> str:
    """The name under which ``writer`` pins a knob until then, nanoseconds of the machine's monotonic clock.

    The engine keeps it with the value, so a pin survives the daemon and ends with the engine.
    """
    return f"{writer[:_MAX_NAME_CHARS]};until={until_ns // 1_000_000_000}"


def ends_ns(writer: str) -> int | None:
    """When a pin ends; None for a name that is no pin."""
    found = _PINNED.fullmatch(writer)
    return None if found is None else int(found["until"]) * 1_000_000_000


def who_of(writer: str) -> str:
    """A writer without a pin's time."""
    found = _PINNED.fullmatch(writer)
    return writer if found is None else found["who"]


def has_ended(writer: str, now_ns: int) -> bool:
    """Whether a pin's time is over; False for a name that is no pin."""
    until_ns = ends_ns(writer)
    return until_ns is not None and now_ns >= until_ns


def is_the_daemons(writer: str, now_ns: int) -> bool:
    """Whether the daemon may move a knob with this writer: nobody has set it, or it was given back."""
    return writer in {OWN_WRITER, STARTUP_WRITER} or writer.startswith(RELEASE_PREFIX) or has_ended(writer, now_ns)


def not_the_daemons(writers: Mapping[str, str], now_ns: int) -> list[str]:
    """Of knobs with their writers, those that somebody has set and not given back, and whose pins have not ended."""
    return [knob for knob, writer in writers.items() if not is_the_daemons(writer, now_ns)]


def until_text(until_ns: int, now_ns: int, wall_s: float) -> str:
    """A pin's end for people, by the wall clock of now: ``until 17:05, for another 119 min``; with its date from a day
    on.
    """
    left_ns = max(0, until_ns - now_ns)
    left = f"for another {rough_time(left_ns / 1e9)}"
    try:
        ends = datetime.fromtimestamp(wall_s + left_ns / 1e9, UTC).astimezone()
    except (ValueError, OverflowError, OSError):  # beyond the calendar: names come from whoever writes
        return left
    return f"until {ends.strftime('%Y-%m-%d %H:%M' if left_ns >= _DAY_NS else '%H:%M')}, {left}"
