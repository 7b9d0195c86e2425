# ruff: noqa: T201 - a command: printing is its output
"""Check every Triton kernel on this machine's GPU against the references, then time a few typical calls.

``python -m kernels.gpu_smoke`` needs torch, triton and numpy. Prints a line per check, then timings (medians over CUDA
events), and last one JSON line, which it also writes to ``--out``. Exit code 0 if all is right, 1 if a kernel is wrong,
2 if there is no CUDA device.

Bounds: decode reads every stored byte once, so its figure to beat is the card's memory bandwidth (``read_gbps``);
``contiguous_us`` is torch's own attention over the same tokens, contiguous and native.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kernels.layout import CHUNK_TOKENS, FORMATS, INT4, INT8, K8V4, NATIVE, OFFSET_UNIT, KVFormat, KVShape
from kernels.table import TableView


def main(arguments: list[str] | None = None) -> int:
    """Run checks and timings; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m kernels.gpu_smoke", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("build/gpu_smoke.json"), help="where the JSON goes")
    parser.add_argument("--quick", action="store_true", help="one shape only")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("gpu_smoke: no CUDA device here, nothing checked", file=sys.stderr)
        return 2
    if importlib.util.find_spec("triton") is None:
        print("gpu_smoke: triton is not installed, nothing checked", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    result = _describe(device)
    started = time.perf_counter()
    failures, checks = _run_checks(device, quick=options.quick)
    result["checks"], result["failures"] = checks, failures
    result["checks_s"] = round(time.perf_counter() - started, 1)
    result["timings"] = [] if failures else list(_timings(device))
    line = json.dumps(result)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(line + "\n", encoding="utf-8")
    print(line)
    return 1 if failures else 0


def _describe(device: torch.device) -> dict[str, Any]:
    import triton  # noqa: PLC0415 - optional: main says so in one line where it is missing

    return {
        "date": dt.datetime.now(tz=dt.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device),
        "capability": list(torch.cuda.get_device_capability(device)),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
    }


def _run_checks(device: torch.device, *, quick: bool) -> tuple[list[str], list[dict[str, Any]]]:
    failures: list[str] = []
    checks: list[dict[str, Any]] = []
    for name, check in _checks(device, quick=quick):
        try:
            error = check()
        except Exception as problem:  # noqa: BLE001 - a kernel that does not compile is a finding like a wrong one
            failures.append(f"{name}: {type(problem).__name__}: {str(problem)[:300]}")
            print(f"FAIL {failures[-1]}", flush=True)
            continue
        checks.append({"name": name, "error_in_tolerances": error})
        print(f"ok   {name}" + ("" if error is None else f" (error {error:.3f} of the tolerance)"), flush=True)
    return failures, checks


def _checks(device: torch.device, *, quick: bool) -> Iterator[tuple[str, Callable[[], float | None]]]:
    from kernels.triton import cases, checks  # noqa: PLC0415 - imports triton

    shapes = [cases.Geometry(torch.bfloat16, 128, kv_heads=2, group=4)]
    if not quick:
        shapes += [
            cases.Geometry(torch.bfloat16, dim, group=group) for dim, group in ((64, 2), (80, 1), (96, 7), (256, 2))
        ]
        shapes += [cases.Geometry(torch.float16, dim) for dim in (64, 128)]
        shapes += [cases.Geometry(torch.float32, dim) for dim in (64, 80, 128)]
    long = cases.mixed_segments(1500, FORMATS, (64, 32, 128, 256, 16))
    sequences = [
        long,
        cases.mixed_segments(1, (NATIVE,), (16,)),
        cases.mixed_segments(700, (INT4, NATIVE), (64, 32), hole=(32, 448)),
        cases.mixed_segments(4100, (K8V4, INT8, NATIVE), (32, 64)),
        cases.shared_prefix_segments(),
    ]
    runs = [(INT8, 512), (NATIVE, 256), (INT4, 512), (K8V4, 256), (NATIVE, 77)]
    chunks = [512, 1, 33, 1000, 7]
    host = torch.device("cpu")
    for source, target in ((device, device), (host, device), (device, host)):
        for pinned in (True, False):
            name = f"copy_bytes {source.type} to {target.type}, host memory {'pinned' if pinned else 'pageable'}"
            yield name, partial(_copied, source, target, pinned=pinned)
    for seed, shape in enumerate(shapes):
        yield f"write_kv {shape}", partial(checks.check_write, shape, device, seed=seed)
        for scale in (1.0, 1e-5, 300.0):
            yield f"recode {shape} x {scale:g}", partial(checks.check_recode, shape, device, seed=seed, scale=scale)
        yield f"gather_kv {shape}", partial(checks.check_gather, shape, long, device, seed=seed)
        for window in (0, 300):
            decode = partial(checks.check_decode, shape, sequences, device, window=window, seed=seed)
            yield f"decode_attention {shape} window {window}", decode
            prefill = partial(checks.check_prefill, shape, sequences, chunks, device, window=window, seed=seed)
            yield f"prefill_attention {shape} window {window}", prefill
            mass = partial(checks.check_mass, shape, sequences, chunks, device, last=64, window=window, seed=seed)
            yield f"attention_mass {shape} window {window}", mass
        sizes = (256, 128, 64, 32, 16)
        yield f"block sizes {shape}", partial(checks.check_block_sizes, shape, runs, sizes, device, seed=seed)


def _copied(source: torch.device, target: torch.device, *, pinned: bool) -> None:
    from kernels.triton import checks  # noqa: PLC0415 - imports triton

    for seed in range(4):
        checks.check_copy(source, target, pinned=pinned, seed=seed)


def _timings(device: torch.device) -> Iterator[dict[str, Any]]:
    from kernels.triton.attention_mass import attention_mass  # noqa: PLC0415 - imports triton
    from kernels.triton.decode_attention import decode_attention  # noqa: PLC0415
    from kernels.triton.prefill_attention import prefill_attention  # noqa: PLC0415
    from kernels.triton.recode import recode  # noqa: PLC0415
    from kernels.triton.write_kv import write_kv  # noqa: PLC0415

    shape, group, dtype = KVShape(1, 8, 128, 2), 4, torch.bfloat16
    heads, scale = shape.num_kv_heads * group, 128**-0.5
    for sequences, tokens in ((1, 32768), (32, 4096), (128, 512)):
        contiguous = _contiguous_us(sequences, tokens, shape, group, device)
        for kv_format in (NATIVE, INT8, K8V4, INT4):
            for block_size in (32, 256):
                arena, table = _uniform_cache(shape, kv_format, block_size, sequences, tokens, device)
                query = torch.randn((sequences, heads, 128), device=device, dtype=dtype)
                out = torch.empty_like(query)
                run = partial(decode_attention, query, arena, shape, 0, table, scale=scale, out=out)
                micros = median_us(run)
                mass = torch.empty((sequences, shape.num_kv_heads, tokens // CHUNK_TOKENS), device=device)
                with_mass = median_us(partial(run, mass=mass))
                yield _shown(
                    {
                        "call": "decode", "format": kv_format.name, "block_size": block_size, "sequences": sequences,
                        "tokens": tokens, "us": micros, "with_mass_us": with_mass,
                        "contiguous_us": contiguous, "read_gbps": round(arena.numel() / micros / 1e3, 1),
                    }
                )  # fmt: skip
    for kv_format in (NATIVE, INT4):
        arena, table = _uniform_cache(shape, kv_format, 32, 1, 8192, device)
        query = torch.randn((64, heads, 128), device=device, dtype=dtype)
        starts = torch.tensor([0, 64], dtype=torch.int32, device=device)
        mass = torch.empty((1, shape.num_kv_heads, 8192 // CHUNK_TOKENS), device=device)
        end = TableView(table.entries, table.num_entries, table.query_first - 63)
        micros = median_us(
            partial(attention_mass, query, arena, shape, 0, end, starts, scale=scale, last=64, mass=mass)
        )
        yield _shown({"call": "attention_mass", "format": kv_format.name, "last": 64, "context": 8192, "us": micros})
        table = TableView(table.entries, table.num_entries, table.query_first - 2047)
        query = torch.randn((2048, heads, 128), device=device, dtype=dtype)
        out, starts = torch.empty_like(query), torch.tensor([0, 2048], dtype=torch.int32, device=device)
        micros = median_us(partial(prefill_attention, query, arena, shape, 0, table, starts, scale=scale, out=out))
        flops = 4 * heads * 128 * sum(range(8192 - 2047, 8193))
        yield _shown(
            {
                "call": "prefill", "format": kv_format.name, "queries": 2048, "context": 8192, "us": micros,
                "tflops": round(flops / micros / 1e6, 1),
            }
        )  # fmt: skip
    arena, table = _uniform_cache(shape, NATIVE, 32, 1, 32768, device)
    for kv_format in (INT8, K8V4, INT4):
        grown, jobs = _recode_jobs(arena, shape, table, kv_format)
        micros = median_us(partial(recode, grown, shape, jobs, native_dtype=dtype))
        yield _shown({"call": "recode", "to": kv_format.name, "tokens": 32768, "layers": 1, "us": micros})
    keys = torch.randn((2048, 8, 128), device=device, dtype=dtype)
    index = torch.arange(2048, device=device, dtype=torch.int32)
    entry = table.entries[0, index // 32, 0]
    slots = torch.stack((entry, index % 32), dim=1)
    micros = median_us(partial(write_kv, arena, shape, 0, keys, keys, slots))
    yield _shown({"call": "write_kv", "tokens": 2048, "us": micros})
    yield from _copy_timings(device)


def _copy_timings(device: torch.device) -> Iterator[dict[str, Any]]:
    """16 MiB in shuffled runs between the card and pinned host memory, and (``whole_us``) as one copy by the driver."""
    from kernels.triton.copy_bytes import copy_bytes  # noqa: PLC0415 - imports triton

    total = 16 << 20
    on_card, on_host = torch.zeros(total, dtype=torch.uint8, device=device), torch.zeros(total, dtype=torch.uint8)
    pinned = on_host.pin_memory()
    for size in (2 << 10, 16 << 10, 64 << 10):
        count = total // size
        rows = torch.stack(
            (torch.arange(count) * size, torch.randperm(count) * size, torch.full((count,), size)), dim=1
        )
        for name, source, target in (("to_card", pinned, on_card), ("to_host", on_card, pinned)):
            micros = median_us(partial(copy_bytes, source, target, rows))
            whole = median_us(partial(target.copy_, source, non_blocking=True))
            yield _shown(
                {"call": "copy_bytes", "way": name, "run_bytes": size, "bytes": total, "us": micros, "whole_us": whole}
            )


def median_us(call: Callable[[], object], repeats: int = 20) -> float:
    """Median of CUDA-event times of a call, microseconds, after three calls of warm-up."""
    for _ in range(3):
        call()
    times: list[float] = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return round(statistics.median(times), 1)


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return row


def _uniform_cache(
    shape: KVShape, kv_format: KVFormat, block_size: int, sequences: int, tokens: int, device: torch.device
) -> tuple[torch.Tensor, TableView]:
    """A cache of one class with random bytes (small exponents, so all values are finite) at shuffled offsets."""
    blocks = sequences * tokens // block_size
    units = shape.block_bytes(kv_format, block_size) // OFFSET_UNIT
    arena = torch.randint(0, 128, (blocks * units * OFFSET_UNIT,), dtype=torch.uint8, device=device)
    # Odd bytes are the high halves of 16-bit floats: 0x20 .. 0x3f keeps them under 2.
    arena[1::2] = arena[1::2] % 32 + 32
    entries = torch.zeros((sequences, tokens // block_size, 4), dtype=torch.int32, device=device)
    entries[..., 0] = (torch.randperm(blocks, device=device) * units).view(sequences, -1)
    entries[..., 1] = kv_format.code
    entries[..., 2] = torch.arange(0, tokens, block_size, device=device)
    entries[..., 3] = block_size
    counts = torch.full((sequences,), tokens // block_size, dtype=torch.int32, device=device)
    return arena, TableView(entries, counts, torch.full((sequences,), tokens - 1, dtype=torch.int32, device=device))


def _recode_jobs(
    arena: torch.Tensor, shape: KVShape, table: TableView, kv_format: KVFormat
) -> tuple[torch.Tensor, torch.Tensor]:
    """The arena with room behind it, and one job per native block of 32 to a tile of ``kv_format`` there."""
    source = table.entries[0, :, 0]
    base = arena.numel() // OFFSET_UNIT
    units = shape.block_bytes(kv_format, 32) // OFFSET_UNIT
    index = torch.arange(len(source), dtype=torch.int32, device=arena.device)
    zero = torch.zeros_like(index)
    jobs = torch.stack((zero + kv_format.code, base + index * units, zero, zero, source, zero, source, zero + 1), dim=1)
    return torch.cat((arena, arena.new_zeros(len(source) * units * OFFSET_UNIT))), jobs.to(torch.int32)


def _contiguous_us(sequences: int, tokens: int, shape: KVShape, group: int, device: torch.device) -> float:
    heads = shape.num_kv_heads * group
    query = torch.randn((sequences, heads, 1, shape.head_dim), device=device, dtype=torch.bfloat16)
    key = torch.randn((sequences, shape.num_kv_heads, tokens, shape.head_dim), device=device, dtype=torch.bfloat16)
    attention = torch.nn.functional.scaled_dot_product_attention
    return median_us(partial(attention, query, key, key, enable_gqa=True))


if __name__ == "__main__":
    sys.exit(main())
