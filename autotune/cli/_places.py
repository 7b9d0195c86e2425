"""Where a command writes: each file writable, none that it also reads, none twice."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from autotune.cli._shared import CliError, check_writable

STDOUT: Final = "-"


def check_places(outputs: Mapping[str, Path | None], inputs: Mapping[str, str | Path | None] | None = None) -> None:
    """Files by option, before anything takes minutes; None and ``-`` are none. What names no file (a preset, a built-in
    workload) may stand among ``inputs``. Raises CliError, one line.
    """
    known = [(name, Path(place)) for name, place in (inputs or {}).items() if place and os.path.isfile(place)]  # noqa: PTH113  # a name may be too long to be a file
    for option, place in outputs.items():
        if place is None or str(place) == STDOUT:
            continue
        check_writable(place)
        for other, taken in known:
            if _is_same(place, taken):
                does = "is read from" if inputs is not None and other in inputs else "is written to"
                raise CliError(f"{option}: {place} {does} by {other} as well; name another file", 2)
        known.append((option, place))


def _is_same(one: Path, other: Path) -> bool:
    """Whether what is written to one is lost in the other. Devices and pipes take from several writers."""
    if one.exists() and not one.is_file():
        return False
    if one.exists() and other.exists():
        return one.samefile(other)
    return os.path.realpath(one) == os.path.realpath(other)
