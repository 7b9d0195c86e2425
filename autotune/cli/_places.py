"""Where a command writes: each file writable, none that it also reads, none twice; or standard output, once."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import typer

from autotune.cli._shared import STDOUT, CliError, check_writable


def is_stdout(place: Path | None) -> bool:
    """Whether an output is asked for there. What is meant for people goes to standard error then."""
    return place is not None and str(place) == STDOUT


def write_parts(place: Path, parts: Iterable[str]) -> None:
    """One after the other, as UTF-8, to a file or to standard output. Raises CliError for what cannot be written, and
    BrokenPipeError where nobody reads any more.
    """
    try:
        if is_stdout(place):
            for part in parts:
                typer.echo(part.encode(), nl=False)
            return
        with place.open("w", encoding="utf-8") as stream:
            stream.writelines(parts)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CliError(f"{place}: cannot be written: {error.strerror}") from error


def check_places(outputs: Mapping[str, Path | None], inputs: Mapping[str, str | Path | None] | None = None) -> None:
    """Files by option, before anything takes minutes; None is none, and ``-`` is standard output. What names no file (a
    preset, a built-in workload) may stand among ``inputs``. Raises CliError, one line.
    """
    said = [option for option, place in outputs.items() if is_stdout(place)]
    if len(said) > 1:
        raise CliError(f"{' and '.join(said)} cannot both go to standard output; name a file for one of them", 2)
    known = [(name, Path(place)) for name, place in (inputs or {}).items() if place and os.path.isfile(place)]  # noqa: PTH113  # a name may be too long to be a file
    for option, place in outputs.items():
        if place is None or is_stdout(place):
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
