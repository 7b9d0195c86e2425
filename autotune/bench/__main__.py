"""The command line of the daemon's benchmark."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
import traceback
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from autotune.bench import __doc__ as description
from autotune.bench.context import Context, Outcome
from autotune.demo.bundled import bundled_model
from engine.bench_frame import bench_parser, conclude, log
from engine.clock import RealClock

# The first figures of a row that did not get as far as to have any are null.
ROWS: Final[dict[str, tuple[str, ...]]] = {
    "footprint": ("rss_mb", "core_pct", "torch_imported", "series_per_engine"),
    "exposure": ("security_exposure",),
    "kills": ("kill9_ok", "kill9_runs"),
    "month": ("month_ticks", "month_journal_mb", "month_memory_growth_mb", "month_memory_rise_mb"),
    "constant": ("constant_changes_late", "constant_override_ok"),
}
_DEFAULT: Final = ("footprint", "exposure", "kills", "month")


def parser() -> argparse.ArgumentParser:
    result = bench_parser("autotune.bench", description, list(ROWS), _DEFAULT)
    result.epilog = f"{result.epilog}; without --rows {', '.join(_DEFAULT)}, about 45 minutes"
    add = result.add_argument
    add("--model", type=Path, default=None, metavar="DIR", help="model folder (the bundled one)")
    add(
        "--folder",
        type=Path,
        metavar="DIR",
        help="keep logs and journals here (a temporary one, removed if all is well)",
    )
    add("--seed", type=int, default=0, help="of everything random (%(default)s)")
    add("--minutes", type=float, help="of footprint (5) and constant (60)")
    add("--kills", type=int, help="how many (200)")
    add("--ticks", type=int, help="of the month (259200)")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """0; 1 when a row failed or a bar was missed; 2 for wrong usage. The last line on stdout is JSON."""
    arguments = parser().parse_args(argv)
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="kv-bench-"))
    clock = RealClock()
    context = Context(
        arguments.model or bundled_model(), folder, clock, log, arguments.seed, arguments.quick, arguments.minutes,
        arguments.kills, arguments.ticks,
    )  # fmt: skip
    begin_ns = clock.now_ns()
    figures: dict[str, Any] = {}
    failed: dict[str, str] = {}
    missed: list[str] = []
    row_s: dict[str, float] = {}
    for name in arguments.rows:
        row_ns = clock.now_ns()
        try:
            outcome: Outcome = importlib.import_module(f"autotune.bench.{name}").run(context)
            figures |= outcome.figures
            missed += outcome.missed
        except Exception as error:  # noqa: BLE001  # whatever it is, the other rows still count
            log(traceback.format_exc().rstrip())
            figures |= dict.fromkeys(ROWS[name])
            failed[name] = f"{type(error).__name__}: {error}"
        row_s[name] = round((clock.now_ns() - row_ns) / 1e9, 1)
    document = {
        "bench": "daemon",
        "model": context.model.resolve().name,
        "seed": context.seed,
        "quick": context.quick,
        **figures,
        "missed": missed,
        "failed": failed,
        "row_s": row_s,
        "processors": len(os.sched_getaffinity(0)),
        "versions": {"kv-autotune": importlib.metadata.version("kv-autotune"), "python": platform.python_version()},
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "wall_s": round((clock.now_ns() - begin_ns) / 1e9, 1),
    }
    if arguments.folder is None and not (missed or failed):
        shutil.rmtree(folder, ignore_errors=True)
    else:
        log(f"logs and journals: {folder}")
    conclude(document, arguments.json)
    return int(bool(missed or failed))


if __name__ == "__main__":
    sys.exit(main())
