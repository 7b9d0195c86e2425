"""``python -m kernels.bench``: the CPU kernels against torch, and against what memory allows.

Decode attention reads every stored byte of the sequences once and does little with it, so its floor is bytes / memory
bandwidth, measured here by summing an array. Smaller formats lower that floor; whether time falls with it shows how
much of it is arithmetic. Torch must gather blocks first, then attends (see ``kernels/bench/rows.py``).

The last line is JSON. ``decode_ratio_vs_sdpa``: torch's time over ours, native, by context, the smallest of all
batches and head counts; ``int8_over_native`` and ``int4_over_native``: time over native's, by context, the largest;
``bandwidth_share``: floor over time by format, at the longest context, the smallest. On a GPU: ``make gpu-check``.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from typing import Any

import torch

import kernels
from kernels import ops
from kernels.bench import naive, rows
from kernels.bench.measure import Case, read_bandwidth
from kernels.layout import FORMATS

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# (query heads, KV heads, head_dim): a small model's layer, and Llama 3 8B's.
_SMALL, _LARGE = (8, 2, 64), (32, 8, 128)


def cases(*, quick: bool) -> list[Case]:
    """Decode's cases."""
    if quick:
        return [Case(2, 128, *_SMALL), Case(1, 256, *_SMALL)]
    small = [Case(batch, tokens, *_SMALL) for tokens in (512, 2048, 8192) for batch in (1, 8)]
    return small + [Case(1, tokens, *_LARGE) for tokens in (2048, 8192)]


def figures(decoded: list[dict[str, Any]]) -> dict[str, Any]:
    """The promised figures, of decode rows; each is the worst of its cases."""
    contexts = sorted({row["context"] for row in decoded})
    at = {context: [row for row in decoded if row["context"] == context] for context in contexts}
    worst = {
        f"{name}_over_native": {str(context): max(row["over_native"][name] for row in at[context]) for context in at}
        for name in [kv_format.name for kv_format in FORMATS[1:]]
    }
    return {
        "decode_ratio_vs_sdpa": {str(context): min(row["ratio_vs_sdpa"] for row in at[context]) for context in at},
        "decode_ratio_vs_folded": {str(context): min(row["ratio_vs_folded"] for row in at[context]) for context in at},
        **worst,
        "bandwidth_share": {
            kv_format.name: min(row["bandwidth_share"][kv_format.name] for row in at[contexts[-1]])
            for kv_format in FORMATS
        },
        "mass_over_native": {str(context): max(row["mass_over_native"] for row in at[context]) for context in at},
    }


def show(row: dict[str, Any]) -> None:
    """One line per row: milliseconds, and the floor where there is one."""
    floors = row.get("floor_ms", {})
    parts = [
        f"{name} {value:.3f}" + (f" ({floors[name]:.3f})" if name in floors else "")
        for name, value in row["ms"].items()
    ]
    print(f"{row['row']:8s} {row['case']:46s} {'  '.join(parts)}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, return 0."""
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--dtype", default="float32", choices=sorted(_DTYPES), help="native dtype")
    parser.add_argument("--rounds", type=int, default=15, help="medians of so many (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="with 1 (default) processor time counts, else wall time")
    parser.add_argument("--quick", action="store_true", help="tiny cases: whether it runs")
    options = parser.parse_args(arguments)
    started, dtype = time.perf_counter(), _DTYPES[options.dtype]
    torch.set_num_threads(options.threads)
    ops.warm_up(torch.device("cpu"), dtype)
    warm_up = time.perf_counter() - started
    bandwidth = read_bandwidth(size=(1 if options.quick else 256) << 20)
    print(f"{options.dtype}, {options.threads} threads; a sum reads {bandwidth / 1e9:.1f} GB/s;", end=" ")
    print(f"kernels ready after {warm_up:.1f} s (compiled or from disk). Milliseconds (and the floor)\n")
    table = []

    def add(row: dict[str, Any]) -> None:
        table.append(row)
        show(row)

    for case in cases(quick=options.quick):
        add(rows.decode(case, dtype, bandwidth, options.rounds))
    for new_tokens, tokens in ((1, 128), (16, 128)) if options.quick else ((1, 1024), (64, 1024), (512, 1024)):
        add(rows.prefill(Case(1, tokens, *_SMALL), new_tokens, dtype, options.rounds))
    add(rows.storage(dtype, bandwidth, options.rounds, tokens=128 if options.quick else 4096))
    for tokens in (128,) if options.quick else (2048, 8192):
        add(naive.hot_spots(Case(1, tokens, *_SMALL), dtype, options.rounds))
    result = {
        "bench": "kernels",
        "device": platform.processor() or "cpu",
        "dtype": options.dtype,
        "threads": options.threads,
        "bandwidth_bytes_per_s": round(bandwidth),
        "warm_up_s": round(warm_up, 1),
        "versions": {"kernels": kernels.__version__, "torch": torch.__version__, "python": platform.python_version()},
        **figures([row for row in table if row["row"] == "decode"]),
        "rows": table,
        "wall_s": round(time.perf_counter() - started, 1),
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
