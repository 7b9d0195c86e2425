"""Log records: one line each, JSON or plain, by where they go."""

from __future__ import annotations

import json
import logging
import os
import pty
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from engine.logs import JsonLines, PlainLines

SAYS = """
import logging, os, sys, threading
from engine.logs import ANNOUNCEMENTS, set_up_logging
set_up_logging(sys.argv[1], sys.argv[2], os.environ)
logging.getLogger("some.place").info("two\\nlines, \\u2028 and \\x1b[31mred", extra={"decision": 7})
logging.getLogger("some.place").debug("too quiet")
logging.getLogger(ANNOUNCEMENTS).info("here I am")
logging.getLogger("uvicorn.access").info("chatter")
"""
ROOT = Path(__file__).parents[2]


def record(message: str, *arguments: object, **more: Any) -> logging.LogRecord:
    made = logging.LogRecord("some.place", logging.WARNING, __file__, 1, message, arguments, more.pop("exc_info", None))
    vars(made).update(more)
    return made


def run(code: str, *arguments: str, stderr: Any = subprocess.PIPE, **environment: str) -> Any:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        stderr=stderr,
        text=True,
        check=False,
        timeout=60,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )


def test_a_json_record_has_time_level_logger_message_and_decision() -> None:
    line = JsonLines().format(record("%s -> %d", "kv_format", 4, decision=12))
    told = json.loads(line)
    assert datetime.fromisoformat(told.pop("time")).utcoffset() is not None
    assert told == {"level": "warning", "logger": "some.place", "message": "kv_format -> 4", "decision": 12}
    assert "decision" not in json.loads(JsonLines().format(record("nothing decided")))


@pytest.mark.parametrize("hostile", ["a\nb", 'quote " and \\', "\x1b[31m\x00", "\u2028\x85", "\udcff", "x" * 100_000])
def test_whatever_is_logged_a_json_record_is_one_line_of_ascii(hostile: str) -> None:
    line = JsonLines().format(record("%s", hostile))
    assert len(line.splitlines()) == 1
    assert line.isascii()
    assert json.loads(line)["message"] == hostile[:10_000]


def test_a_traceback_is_part_of_its_record() -> None:
    try:
        int("torn")
    except ValueError:
        made = record("failed", exc_info=sys.exc_info())
    line = JsonLines().format(made)
    assert len(line.splitlines()) == 1
    assert json.loads(line)["error"].endswith("'torn'")
    made.exc_text = None
    plain = PlainLines().format(made).splitlines()
    assert plain[0].endswith("WARNING some.place: failed")
    assert plain[-1].startswith("ValueError: ")


def test_a_plain_message_is_one_line_without_control_characters() -> None:
    (line,) = PlainLines().format(record("one\ntwo \x1b[31m")).splitlines()
    assert line.endswith("WARNING some.place: one two [31m")


def test_off_a_terminal_it_is_json() -> None:
    done = run(SAYS, "info", "auto")
    told = [json.loads(line) for line in done.stderr.splitlines()]
    assert [(one["logger"], one.get("decision")) for one in told] == [("some.place", 7), ("engine.serve", None)]
    assert told[0]["message"] == "two\nlines, \u2028 and \x1b[31mred"


def test_announcements_are_shown_at_every_level() -> None:
    (line,) = run(SAYS, "error", "json").stderr.splitlines()
    assert json.loads(line)["message"] == "here I am"


def test_on_a_terminal_it_is_plain_and_stamped() -> None:
    ours, theirs = pty.openpty()
    try:
        run(SAYS, "info", "auto", stderr=theirs)
        told = os.read(ours, 65536).decode().splitlines()
    finally:
        os.close(ours)
        os.close(theirs)
    assert told[0].endswith("INFO some.place: two lines, and [31mred")
    assert told[0].startswith("20")
    assert len(told) == 2


@pytest.mark.parametrize("form", ["json", "human"])
def test_the_journal_gets_priorities_and_stamps_lines_itself(form: str, tmp_path: Path) -> None:
    with (tmp_path / "journal").open("w+") as stream:
        status = os.fstat(stream.fileno())
        run(SAYS, "info", form, stderr=stream, JOURNAL_STREAM=f"{status.st_dev}:{status.st_ino}")
        stream.seek(0)
        told = stream.read().splitlines()
    assert len(told) == 2
    assert all(line.startswith("<6>") for line in told)
    if form == "human":
        assert told[1] == "<6>INFO engine.serve: here I am"
    else:
        assert json.loads(told[1][3:])["message"] == "here I am"
    elsewhere = run(SAYS, "info", form, JOURNAL_STREAM="1:2").stderr
    assert "<6>" not in elsewhere, "another stream than the journal's"


def test_what_nobody_caught_is_a_record_too() -> None:
    code = SAYS + (
        "def fail(): raise KeyError('in a thread')\n"
        "thread = threading.Thread(target=fail); thread.start(); thread.join()\n"
        "raise ValueError('at the top')\n"
    )
    done = run(code, "warning", "json")
    told = [json.loads(line) for line in done.stderr.splitlines()]
    assert [one["message"] for one in told if one["logger"] == "uncaught"] == [
        "KeyError: 'in a thread'",
        "ValueError: at the top",
    ]
    assert "Traceback" in told[-1]["error"]
    assert done.returncode == 1


def test_a_process_that_logs_already_is_left_alone() -> None:
    code = "import logging\nlogging.basicConfig(format='mine %(message)s')\n" + SAYS
    done = run(code + "logging.getLogger('x').warning('still')\n", "info", "json")
    assert done.stderr == "mine still\n"
