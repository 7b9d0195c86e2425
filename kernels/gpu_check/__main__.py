# ruff: noqa: T201 - a command: printing is its output
"""Check every Triton kernel on this machine's GPU against the references, then time fixed configurations.

``python -m kernels.gpu_check`` needs torch, triton and numpy, no network. In order: every kernel checked at the shape
that is timed; 24 core points of decode; checks of other shapes; other libraries' decode where importable; prefill,
recode and the others; then the rest of decode's grid, until the time is up (``--budget``, by default under six
minutes). Each row is written to ``OUT.jsonl`` as it is measured, and a second run goes on from there. At the end
``OUT.md`` holds a table and ``OUT.json`` one line.

Decode reads every stored byte once, so its bound is memory: ``share_of_copy`` relates what it reads per second to what
torch's copy of a large tensor reads and writes. ``sdpa_us`` is torch's attention over the same tokens, contiguous and
native. Exit code 0 if all is right, 1 if a kernel is wrong (then nothing is timed), 2 if there is no CUDA device.
"""

from __future__ import annotations

import argparse
import datetime as dt
import hashlib
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import kernels
from kernels.gpu_check.report import Journal, Row, summary, table
from kernels.layout import FORMATS

if TYPE_CHECKING:
    from kernels.gpu_check.points import Point  # imports triton, which may be missing


def main(arguments: Sequence[str] | None = None, *, now: Callable[[], float] = time.monotonic) -> int:
    """Run checks and timings; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m kernels.gpu_check", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, default=Path("docs/results/gpu_check"), help="path without a suffix")
    parser.add_argument("--budget", type=float, default=330.0, help="seconds, nothing is begun after (default: 330)")
    parser.add_argument(
        "--mini", action="store_true", help="tiny sizes on the CPU under TRITON_INTERPRET=1: a rehearsal"
    )
    options = parser.parse_args(arguments)
    started = now()
    if not options.mini and not torch.cuda.is_available():
        print("gpu_check: no CUDA device here, nothing checked", file=sys.stderr)
        return 2
    if importlib.util.find_spec("triton") is None:
        print("gpu_check: triton is not installed, nothing checked", file=sys.stderr)
        return 2
    device = torch.device("cpu" if options.mini else "cuda")
    journal = Journal(options.out.with_suffix(".jsonl"), _header(device))
    journal.open()
    run = _Run(device, journal, options.mini, started + options.budget, now)
    left = run.everything()
    failures = [row for row in journal.rows.values() if "failure" in row]
    rows = list(journal.rows.values())
    figures = summary(rows)
    result = {
        **journal.header, "date": dt.datetime.now(tz=dt.UTC).isoformat(timespec="seconds"),
        "failures": [f"{row['key']}: {row['failure']}" for row in failures],
        "checks": sum("check" in row for row in rows), "left": left, "wall_s": round(now() - started, 1),
        **figures, "rows": rows,
    }  # fmt: skip
    line = json.dumps(result)
    options.out.with_suffix(".json").write_text(line + "\n", encoding="utf-8")
    known = {"bandwidth_gbps": journal.rows.get("copy bandwidth", {}).get("gbps"), "date": result["date"], **figures}
    timed = [row for row in rows if "call" in row]
    options.out.with_suffix(".md").write_text(table(journal.header, timed, known), encoding="utf-8")
    print(line)
    return 1 if failures else 0


def _header(device: torch.device) -> Row:
    import triton  # noqa: PLC0415 - optional: main says so in one line where it is missing

    cuda = device.type == "cuda"
    return {
        "bench": "gpu_check",
        "device": torch.cuda.get_device_name(device) if cuda else "cpu, interpreted: figures mean nothing",
        "capability": list(torch.cuda.get_device_capability(device)) if cuda else None,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "python": sys.version.split()[0],
        "sources": _digest(),
    }


def _digest() -> str:
    """Of all kernel sources: results of other ones are not gone on with."""
    folder = Path(kernels.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class _Run:
    device: torch.device
    journal: Journal
    mini: bool
    until: float
    now: Callable[[], float]

    def everything(self) -> int:
        """Check and time what the journal lacks, until time is up; returns how much is left.

        After a wrong kernel nothing is timed: fast and wrong is no result.
        """
        from kernels.gpu_check import correctness, peers, points, timing  # noqa: PLC0415 - these import triton

        left = self._check(correctness.first_checks(self.device, mini=self.mini))
        if self._is_wrong():
            return left
        clock = timing.Clock(self.device)
        if "copy bandwidth" not in self.journal.rows:
            self.journal.add("copy bandwidth", {"gbps": round(clock.copy_bandwidth(), 1)})
        bandwidth = self.journal.rows["copy bandwidth"]["gbps"]
        print(f"copy bandwidth {bandwidth} GB/s", flush=True)
        scale = points.MINI if self.mini else points.FULL
        ours, core = list(points.all_points(scale, clock, bandwidth)), len(scale.core) * len(FORMATS)
        left += self._time(ours[:core])
        left += self._check(correctness.more_checks(self.device, mini=self.mini))
        if self._is_wrong():
            return left
        return left + self._time([*peers.peer_points(scale, clock, bandwidth), *ours[core:]])

    def _is_wrong(self) -> bool:
        return any("failure" in row for row in self.journal.rows.values())

    def _check(self, checks: Iterable[tuple[str, Callable[[], float | None]]]) -> int:
        left = 0
        for name, check in checks:
            key = f"check {name}"
            if "error_in_tolerances" in self.journal.rows.get(key, {}):
                continue
            if self.now() > self.until:
                left += 1
                continue
            row: Row = {"check": name}
            try:
                row["error_in_tolerances"] = check()
            except Exception as problem:  # noqa: BLE001 - a kernel that does not compile is a finding like a wrong one
                row["failure"] = f"{type(problem).__name__}: {str(problem)[:300]}"
            self.journal.add(key, row)
            print(f"{'FAIL' if 'failure' in row else 'ok  '} {_text(row)}", flush=True)
        return left

    def _time(self, points: Iterable[Point]) -> int:
        left = 0
        for point in points:
            if point.key in self.journal.rows:
                continue
            if self.now() > self.until:
                left += 1
                continue
            try:
                row = point.measure()
            except Exception as problem:  # noqa: BLE001 - one point that fails must not cost the others
                row = {"skipped": f"{type(problem).__name__}: {str(problem)[:300]}"}
            self.journal.add(point.key, row)
            print(_text({"point": point.key, **row}) if "skipped" in row else _text(row), flush=True)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        return left


def _text(row: Row) -> str:
    return "  ".join(f"{name} {value}" for name, value in row.items())


if __name__ == "__main__":
    sys.exit(main())
