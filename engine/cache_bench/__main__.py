"""The command line of the benchmark."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import engine
from engine.bench_frame import bench_parser, conclude, folder, log
from engine.cache_bench import __doc__ as description
from engine.cache_bench.context import Context
from engine.cache_bench.registry import load_rows, row_names
from engine.cache_bench.report import run_rows
from engine.clock import RealClock
from engine.errors import EngineError
from engine.machine_info import machine_info
from engine.models.folder import check_folder

BUNDLED_MODEL = Path(engine.__file__).parent / "bundled" / "model"


def parser() -> argparse.ArgumentParser:
    result = bench_parser("engine.cache_bench", description, row_names())
    add = result.add_argument
    add("--model", type=Path, default=BUNDLED_MODEL, metavar="DIR", help="model folder (the bundled one)")
    add("--text", type=folder, metavar="DIR", help="texts for perplexity; one of them must be held out from training")
    add("--traces", type=folder, metavar="DIR", help="request traces")
    add("--device", default="cpu", help="cpu or cuda (%(default)s)")
    add("--seed", type=int, default=0, help="of everything random (%(default)s)")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """0, 1 when a row failed, 2 for wrong usage. Progress goes to stdout too; its last line is JSON."""
    arguments = parser().parse_args(argv)
    clock = RealClock()
    begin_ns = clock.now_ns()
    try:
        check_folder(arguments.model)
        rows = load_rows(arguments.rows)
    except (EngineError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    context = Context(
        model=arguments.model,
        text=arguments.text,
        traces=arguments.traces,
        seed=arguments.seed,
        quick=arguments.quick,
        log=log,
        device=arguments.device,
    )
    report = run_rows(rows, context, clock)
    document = {
        "bench": "cache",
        "model": arguments.model.resolve().name,
        "seed": arguments.seed,
        "quick": arguments.quick,
        **report.to_json(),
        **machine_info(arguments.device),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "wall_s": round((clock.now_ns() - begin_ns) / 1e9, 1),
    }
    conclude(document, arguments.json)
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
