"""What to type after a demonstration to look further."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from autotune.demo.report import Arm


def how_to_look(arms: Sequence[Arm], program: Sequence[str]) -> list[str]:
    """Commands for the first journal with a decision in it, at its last change of format, or its last change.

    ``program``: how this program is called, as words.
    """
    tuned = [arm for arm in arms if arm.side.is_tuned]
    if not tuned:
        return []
    kept = next((arm for arm in tuned if arm.journal is not None and arm.seen.applied), None)
    if kept is None or kept.journal is None:
        if any(arm.journal is not None for arm in tuned):
            return []
        return ["its journals went with their temporary folder; --run-dir FOLDER keeps them for autotune explain"]
    applied = kept.seen.applied
    tick = next((one.tick for one in reversed(applied) if one.knob == "kv_format"), applied[-1].tick)
    where = ("--journal", str(kept.journal))
    return [
        f"more about a decision: {shlex.join([*program, 'explain', str(tick), *where])}",
        f"all of them: {shlex.join([*program, 'decisions', *where])}",
    ]


def program_words(invoked: str, python: str) -> list[str]:
    """How this program was called. ``invoked``: ``sys.argv[0]``; ``python``: the interpreter, for a module."""
    if Path(invoked).name != "autotune":
        return [python, "-m", "autotune"]
    found = shutil.which("autotune")
    return ["autotune"] if found is not None and Path(found).resolve() == Path(invoked).resolve() else [invoked]
