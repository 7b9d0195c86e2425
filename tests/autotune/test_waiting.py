"""Something is to be seen while a person waits, on a terminal and in a log."""

from __future__ import annotations

import io
import re
import threading

from rich.console import Console
from waiting import until

from autotune.waiting import counting, waiting


def test_a_log_gets_plain_lines_and_not_one_per_step() -> None:
    console = Console(file=io.StringIO())
    with waiting(console, "starting [x]"):
        assert console.file.getvalue() == "starting [x] ...\n"  # before anything is done
    console = Console(file=io.StringIO())
    with counting(console, "loading") as tell:
        assert console.file.getvalue() == "loading ...\n"
        tell(0, 40, "compiling")
        for done in range(1, 41):
            tell(done, 40, f"load {done}")
    lines = console.file.getvalue().splitlines()
    assert lines[:3] == ["loading ...", "compiling ...", "4/40 load 4"]
    assert lines[-1] == "40/40 load 40"
    assert len(lines) == 12


def test_a_log_is_told_now_and_then_that_something_still_goes_on() -> None:
    console = Console(file=io.StringIO())
    with waiting(console, "starting [x]", "compiling [y]", every_s=0.05):
        until(lambda: console.file.getvalue().count("\n") >= 3, "two reminders")
    shown = console.file.getvalue()
    assert re.fullmatch(r"starting \[x\] \.\.\.\n(compiling \[y\], \d+ s so far\n){2,}", shown)
    assert all(thread.name != "reminders" for thread in threading.enumerate())  # nobody is left to say more


def test_a_terminal_shows_what_is_waited_for_and_is_clean_afterwards() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, record=True)
    with waiting(console, "starting [x]"):
        pass
    with counting(console, "loading") as tell:
        tell(3, 40, "load [3]")
    shown = console.file.getvalue()
    for words in ("starting [x]", "0:00:00", "loading", "load [3]", "3/40"):
        assert words in shown
    assert shown.endswith("\x1b[2K")  # the last line is erased
