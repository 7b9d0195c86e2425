"""The command line of the benchmark."""

from __future__ import annotations

import argparse
import importlib
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
from engine.bench_frame import bench_parser, conclude, log, names_of
from engine.machine_info import machine_info
from kernels.layout import FORMAT_BY_NAME

_CLOCKS = {"processor": time.process_time_ns, "wall": time.perf_counter_ns}


def row_names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(rows.__path__))


def parser() -> argparse.ArgumentParser:
    result = bench_parser("engine.bench", description, row_names())
    add = result.add_argument
    formats = list(FORMAT_BY_NAME)
    add("--formats", type=names_of(formats), default=formats, metavar="A,B", help="KV formats (all)")
    add("--concurrency", type=_numbers, default=(1, 8, 32, 128), metavar="N,M", help="requests at a time (1,8,32,128)")
    add("--clock", choices=_CLOCKS, default="processor", help="of what runs in this process (%(default)s)")
    add("--models", type=Path, metavar="DIR", help="keep the models that are made here, and take what is there")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 1 when a row failed. Progress goes to stdout too; its last line is JSON."""
    arguments = parser().parse_args(argv)
    document: dict[str, Any] = {"bench": "engine", "clock": arguments.clock, "quick": arguments.quick}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="bench-models-") as made:
        context = Context(
            arguments.models or Path(made), tuple(arguments.formats), arguments.concurrency, _CLOCKS[arguments.clock],
            arguments.quick, log,
        )  # fmt: skip
        for name in arguments.rows:
            log(f"{name}:")
            try:
                document |= importlib.import_module(f"{rows.__name__}.{name}").run(context)
            except Exception as error:  # noqa: BLE001 - whatever it is, the other rows still count
                failed[name] = f"{type(error).__name__}: {error}"
                log(f"  failed: {failed[name]}")
    finished = datetime.now(UTC).isoformat(timespec="seconds")
    document |= {"failed": failed, **machine_info("cpu"), "finished": finished}
    conclude(document, arguments.json)
    return 1 if failed else 0


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
