"""How engine and daemon log: a record is a line. JSON for machines, plain text for people on a terminal. Stdlib only.

A JSON record has ``time`` (RFC 3339, UTC), ``level``, ``logger`` and ``message``; ``decision``, the tick that decided,
where a record is about one; ``error``, the traceback, where there is one. Neither tokens nor prompts are ever logged:
nothing that handles them hands them to a logger.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Final, TextIO

from engine.text import one_line

FORMATS: Final = ("auto", "json", "human")
LEVELS: Final = ("debug", "info", "warning", "error")
ANNOUNCEMENTS: Final = "engine.serve"
"""What this logger says whoever starts an engine waits for: it is shown at every level."""
_CHATTY: Final = ("httpx", "httpcore", "apscheduler", "uvicorn", "asyncio")
_MOST_CHARS: Final = 10_000
# syslog's numbers, as the system's journal reads them at the beginning of a line
_PRIORITIES: Final = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}


def set_up_logging(level: str, wanted: str, environment: Mapping[str, str], stream: TextIO | None = None) -> None:
    """Have this process log to ``stream``, stderr if None. ``wanted``: one of FORMATS; auto is JSON unless the stream
    is a terminal.

    For the entry of a command line: it configures the whole process, unless somebody else has done so already.
    """
    if logging.getLogger().handlers:
        return
    stream = sys.stderr if stream is None else stream
    is_json = wanted == "json" or (wanted == "auto" and not stream.isatty())
    is_journal = goes_to_journal(stream, environment)
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines(is_journal) if is_json else PlainLines(is_journal))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger(ANNOUNCEMENTS).setLevel(min(logging.INFO, logging.getLogger().level))
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.captureWarnings(capture=True)
    if is_json:  # what nobody caught would be many lines that are no record
        sys.excepthook = _log_uncaught
        threading.excepthook = lambda args: _log_uncaught(
            args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback
        )


def goes_to_journal(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Whether systemd's journal reads the stream: ``JOURNAL_STREAM`` names its device and inode."""
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return environment.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


class JsonLines(logging.Formatter):
    """A record as one JSON object on one line, in ASCII. ``is_journal``: with its priority before it."""

    def __init__(self, is_journal: bool = False) -> None:
        super().__init__()
        self._is_journal = is_journal

    def format(self, record: logging.LogRecord) -> str:
        document = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage()[:_MOST_CHARS],
        }
        if (decision := getattr(record, "decision", None)) is not None:
            document["decision"] = decision
        if record.exc_info:
            document["error"] = self.formatException(record.exc_info)
        return _priority(record, self._is_journal) + json.dumps(document)


class PlainLines(logging.Formatter):
    """A record for people; its message on one line, a traceback below. The system's journal stamps lines itself."""

    def __init__(self, is_journal: bool = False) -> None:
        super().__init__(f"{'' if is_journal else '%(asctime)s '}%(levelname)s %(name)s: %(message)s")
        self._is_journal = is_journal

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # logging's name
        record.message = one_line(record.message, _MOST_CHARS)
        return _priority(record, self._is_journal) + super().formatMessage(record)


def _priority(record: logging.LogRecord, is_journal: bool) -> str:
    return f"<{_PRIORITIES.get(record.levelno, 6)}>" if is_journal else ""


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, Exception):
        logging.getLogger("uncaught").critical("%s: %s", kind.__name__, error, exc_info=(kind, error, trace))
    else:  # Ctrl-C and the like
        sys.__excepthook__(kind, error, trace)
