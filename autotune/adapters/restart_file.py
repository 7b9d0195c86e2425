"""The file that tells an engine's unit its settings: an environment file or a systemd drop-in, written whole or not.

It belongs to the daemon alone. One that somebody else has written is never touched.
"""

from __future__ import annotations

import contextlib
import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

from autotune.adapters.base import Flag
from engine.json_text import load_json
from engine.tunables import TunableValue
from engine.whole_file import write_whole

Form = Literal["environment", "drop_in"]

ARGUMENTS: Final = "AUTOTUNE_ENGINE_ARGS"
"""The variable with the arguments, for the end of the unit's command: ``ExecStart=... $AUTOTUNE_ENGINE_ARGS``. An
engine that reads variables of its own gets those as well, which an argument on its command line outweighs.
"""
_HEADER: Final = "# Written by the kv-autotune daemon, which takes it back if it does not help. Do not edit."
_VALUES: Final = "# values: "
_MOST_BYTES: Final = 65536


class FileRefused(Exception):  # noqa: N818 - a state of the world that callers handle, not a mistake
    """The file cannot be used, in one line for people."""


def render(form: Form, given: Mapping[Flag, str], values: Mapping[str, TunableValue]) -> str:
    """The text of the file. ``given``: what the start must be told; ``values``: the knobs, for :func:`values_in`."""
    words = [word for flag, value in given.items() for word in (flag.argument, value)]
    variables = {ARGUMENTS: " ".join(words)}
    variables.update({flag.variable: value for flag, value in given.items() if flag.variable})
    lines = [_HEADER, _VALUES + json.dumps(dict(values), sort_keys=True)]
    if form == "drop_in":
        lines += ["[Service]", *(f'Environment="{name}={value}"' for name, value in variables.items())]
    else:
        lines += [f"{name}={value}" for name, value in variables.items()]
    return "\n".join(lines) + "\n"


def read_own(path: Path) -> str | None:
    """What the daemon wrote there last, None for nothing. Raises FileRefused for anything that is not the daemon's."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise FileRefused(f"{path}: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_BYTES:
        raise FileRefused(f"{path}: not a file of the daemon's")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FileRefused(f"{path}: cannot be read ({error})") from error
    if not text.startswith(_HEADER):
        raise FileRefused(f"{path}: somebody else has written it; name another in restart.file, or remove it")
    return text


def values_in(text: str | None) -> dict[str, TunableValue]:
    """The knobs that a file of the daemon's sets."""
    for line in (text or "").splitlines():
        if line.startswith(_VALUES):
            with contextlib.suppress(ValueError):
                found = load_json(line.removeprefix(_VALUES))
                return dict(found) if isinstance(found, dict) else {}
    return {}


def put(path: Path, text: str | None) -> None:
    """Have the file hold ``text``, or not be there at all: whole or as before. Raises FileRefused."""
    try:
        if text is None:
            path.unlink(missing_ok=True)
            return
        write_whole(path, text, mode=0o644)
    except OSError as error:
        raise FileRefused(f"{path}: cannot be written: {error.strerror or error}") from error
