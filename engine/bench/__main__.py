"""The command line of the benchmark."""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine.bench import __doc__ as description
from engine.bench import rows
from engine.bench.context import Context
from engine.machine_info import machine_info
from kernels.layout import FORMAT_BY_NAME

_CLOCKS = {"processor": time.process_time_ns, "wall": time.perf_counter_ns}


def row_names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(rows.__path__))


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m engine.bench",
        description=description,
        epilog=f"rows: {', '.join(row_names())}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = result.add_argument
    add("--rows", type=_names(row_names()), default=row_names(), metavar="A,B", help="run only these rows")
    formats = list(FORMAT_BY_NAME)
    add("--formats", type=_names(formats), default=formats, metavar="A,B", help="KV formats (all)")
    add("--concurrency", type=_numbers, default=(1, 8, 32, 128), metavar="N,M", help="requests at a time (1,8,32,128)")
    add("--clock", choices=_CLOCKS, default="processor", help="of what runs in this process (%(default)s)")
    add("--models", type=Path, metavar="DIR", help="keep the models that are made here, and take what is there")
    add("--json", type=Path, metavar="FILE", help="write the document here, too")
    add("--quick", action="store_true", help="few repetitions, for a first look")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 1 when a row failed. Progress goes to stdout too; its last line is JSON."""
    arguments = parser().parse_args(argv)
    document: dict[str, Any] = {"bench": "engine", "clock": arguments.clock, "quick": arguments.quick}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="bench-models-") as made:
        context = Context(
            arguments.models or Path(made), tuple(arguments.formats), arguments.concurrency, _CLOCKS[arguments.clock],
            arguments.quick, _log,
        )  # fmt: skip
        for name in arguments.rows:
            _log(f"{name}:")
            try:
                document |= importlib.import_module(f"{rows.__name__}.{name}").run(context)
            except Exception as error:  # noqa: BLE001 - whatever it is, the other rows still count
                failed[name] = f"{type(error).__name__}: {error}"
                _log(f"  failed: {failed[name]}")
    finished = datetime.now(UTC).isoformat(timespec="seconds")
    document |= {"failed": failed, **machine_info("cpu"), "finished": finished}
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(document))
    return 1 if failed else 0


def _log(line: str) -> None:
    print(line, flush=True)


def _names(known: Sequence[str]) -> Any:
    def parse(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            raise argparse.ArgumentTypeError(f"{text!r}: there are {', '.join(known)}")
        return names

    return parse


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give whole numbers from 1 on, as 1,8,32")
    return numbers


if __name__ == "__main__":
    sys.exit(main())
