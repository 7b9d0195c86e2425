"""What the benchmarks' command lines share: which rows to run, progress, and a document whose line is the last."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line."""
        self.exit(2, f"error: {message}\n")


def bench_parser(
    module: str, description: str | None, rows: Sequence[str], default: Sequence[str] = ()
) -> argparse.ArgumentParser:
    """Of ``python -m module``, with ``--rows`` (names out of ``rows``; without it ``default``, or all), ``--quick`` and
    ``--json``. Wrong usage raises SystemExit(2) after one line.
    """
    parser = _Parser(
        prog=f"python -m {module}",
        description=description,
        epilog=f"rows: {', '.join(rows)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, chosen = parser.add_argument, list(default or rows)
    add("--rows", type=names_of(rows), default=chosen, metavar="A,B", help="run only these rows")
    add("--quick", action="store_true", help="short runs, for a first look")
    add("--json", type=Path, metavar="FILE", help="write the document here, too")
    return parser


def names_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """For an option that takes some of these names, comma separated."""

    def parse(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            raise argparse.ArgumentTypeError(f"{''.join(unknown[:1])!r}: choose from {', '.join(known)}")
        return names

    return parse


def folder(text: str) -> Path | None:
    """For an option that takes a folder. Empty means none: ``make`` may hand through a variable that is not set."""
    if text and not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a folder")
    return Path(text) if text else None


def log(line: str) -> None:
    """A line of progress, shown at once."""
    print(line, flush=True)


def conclude(document: Mapping[str, Any], path: Path | None) -> None:
    """Print the document in one line, and write it to a file if there is to be one."""
    if path is not None:
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(document))
