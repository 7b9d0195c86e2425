# ruff: noqa: T201 - a command: printing is its output
"""Compile every kernel for real GPUs without one: registers, spills, shared memory, blocks per multiprocessor.

``python -m kernels.aot`` prints a table and, last, one JSON line; exit code 1 if a kernel does not compile, spills, or
leaves a multiprocessor with fewer than two blocks, unless the report says why that is accepted.

The constants and alignments are those of the launchers for typical models; what a card does with the result is not
measured here.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

import torch
import triton

from kernels.aot.compile import Report, compile_variant
from kernels.aot.variants import variants

ARCHITECTURES = (80, 89, 90, 100)
_SHAPES = ((torch.bfloat16, 128, 4), (torch.bfloat16, 64, 2))  # dtype, head_dim, query heads per KV head
_MORE_SHAPES = tuple(
    (dtype, head_dim, group)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for head_dim, group in ((64, 1), (80, 1), (96, 4), (128, 8), (256, 2))
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile and report; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m kernels.aot", description=__doc__)
    parser.add_argument("--arch", type=int, nargs="+", default=list(ARCHITECTURES), help="compute capabilities")
    parser.add_argument("--full", action="store_true", help="every dtype and head size, not the typical few")
    options = parser.parse_args(arguments)
    reports: list[Report] = []
    failures: list[str] = []
    print(f"triton {triton.__version__}; nothing here was run on a GPU")
    print(
        f"{'kernel':<13} {'dtype':<9} {'dim':>4} {'group':>5} {'sm':>4} {'regs':>5} {'spill':>6} {'shared':>7} blocks"
    )
    for dtype, head_dim, group in _SHAPES + (_MORE_SHAPES if options.full else ()):
        for architecture in options.arch:
            for variant in variants(dtype, head_dim, group, architecture=architecture):
                try:
                    report = compile_variant(variant, architecture)
                except Exception as error:  # noqa: BLE001 - whatever the compiler raises is the finding
                    failures.append(f"{variant} sm_{architecture}: {type(error).__name__}: {str(error)[:200]}")
                    print(failures[-1], file=sys.stderr)
                    continue
                reports.append(report)
                print(
                    f"{report.kernel:<13} {report.dtype:<9} {report.head_dim:>4} {report.group:>5} {architecture:>4} "
                    f"{report.registers:>5} {report.spill_bytes:>6} {report.shared_bytes:>7} {report.blocks:>6}"
                    + ("  accepted" if report.accepted else "  BAD" if report.is_bad else ""),
                    flush=True,
                )
    result = {
        "triton": triton.__version__,
        "compiled": len(reports),
        "spilled": sum(report.spill_bytes > 0 for report in reports),
        "below_two_blocks": sum(report.blocks < 2 for report in reports),
        "bad": sum(report.is_bad for report in reports),
        "failures": failures,
        "kernels": [asdict(report) for report in reports],
    }
    print(json.dumps(result))
    return 1 if failures or result["bad"] else 0


if __name__ == "__main__":
    sys.exit(main())
