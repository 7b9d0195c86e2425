"""``python -m kernels.bench``: the device's kernels against the references, and against what memory allows.

Decode attention reads every stored byte of the sequences once and does little with it, so the bound is bytes / memory
bandwidth, measured here by summing an array that fits no cache. Smaller formats lower that bound; whether time falls
with it shows how much of it is arithmetic. Prefill is bound by arithmetic, 4 x queries x keys x heads x head_dim
operations (half of that where all keys are new), recode by bytes read and written.

The last line is JSON: versions, device, figures. Best of several runs, since another load can only add time.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

import kernels
from kernels import ops
from kernels.layout import ENTRY_WIDTH, FORMATS, INT8, JOB_WIDTH, NATIVE, OFFSET_UNIT, KVFormat, KVShape
from kernels.reference.tiles import tile_parts
from kernels.table import TableView

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Case:
    """Sequences of equal length in blocks of one class."""

    sequences: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int = 64

    def __str__(self) -> str:
        return f"{self.sequences} x {self.tokens} tokens, {self.heads}/{self.kv_heads} heads of {self.head_dim}"


@dataclass(frozen=True)
class Row:
    """One line of the result. ``bound_s``: None where the measured bandwidth says nothing."""

    operation: str
    case: str
    kv_format: str
    seconds: float
    reference_s: float | None
    bytes_moved: int
    bound_s: float | None


class Bench:
    """Measurements on one device with one native dtype."""

    def __init__(self, device: torch.device, dtype: torch.dtype, repeats: int) -> None:
        self.device, self.dtype, self.repeats = device, dtype, repeats
        self.generator = torch.Generator().manual_seed(0)
        started = time.perf_counter()
        ops.warm_up(device, dtype)
        self.warm_up_s = time.perf_counter() - started
        self.bandwidth = self._measure_bandwidth()

    def seconds(self, call: Callable[[], object], repeats: int) -> float:
        """Best time of ``repeats`` calls, after one that does not count."""
        call()
        best = float("inf")
        for _ in range(repeats):
            self._wait()
            started = time.perf_counter()
            call()
            self._wait()
            best = min(best, time.perf_counter() - started)
        return best

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _measure_bandwidth(self) -> float:
        """Bytes per second that a sum reads."""
        array = torch.ones(1 << 26, dtype=torch.float32, device=self.device)
        return array.numel() * 4 / self.seconds(array.sum, 5)

    def cache(self, case: Case, kv_format: KVFormat) -> tuple[torch.Tensor, KVShape, TableView]:
        """Arena and tables of a case: shuffled blocks of random tiles (of 64 different ones: quick to build)."""
        shape = KVShape(1, case.kv_heads, case.head_dim, self.dtype.itemsize)
        stride, block = shape.tile_stride(kv_format), shape.block_bytes(kv_format, case.block_size)
        tiles = torch.zeros((64, 1, case.kv_heads, shape.head_bytes(kv_format)), dtype=torch.uint8)
        size = (64, 1, case.kv_heads, kv_format.tile_tokens, case.head_dim)
        for part in tile_parts(tiles, shape, kv_format, self.dtype):
            values = torch.randn(size, generator=self.generator).to(self.dtype)
            if kv_format.is_native:
                part.data.copy_(values)
            else:
                part.quantise(values.float())
        per_sequence = -(-case.tokens // case.block_size)
        blocks, per_block = case.sequences * per_sequence, case.block_size // kv_format.tile_tokens
        chosen = torch.randint(64, (blocks * per_block,), generator=self.generator)
        arena = torch.zeros((blocks, block), dtype=torch.uint8)
        arena[:, : per_block * stride] = tiles.view(64, stride)[chosen].view(blocks, per_block * stride)
        entries = torch.zeros((case.sequences, per_sequence, ENTRY_WIDTH), dtype=torch.int32)
        first = torch.arange(per_sequence) * case.block_size
        offsets = torch.randperm(blocks, generator=self.generator) * (block // OFFSET_UNIT)
        entries[..., 0] = offsets.view(case.sequences, per_sequence)
        entries[..., 1] = kv_format.code
        entries[..., 2] = first
        entries[..., 3] = (case.tokens - first).clamp(max=case.block_size)
        counts = torch.full((case.sequences,), per_sequence, dtype=torch.int32)
        last = torch.full((case.sequences,), case.tokens - 1, dtype=torch.int32)
        table = TableView(entries.to(self.device), counts.to(self.device), last.to(self.device))
        return arena.view(-1).to(self.device), shape, table

    def decode(self, case: Case, kv_format: KVFormat, *, against_reference: bool) -> Row:
        arena, shape, table = self.cache(case, kv_format)
        size = (case.sequences, case.heads, case.head_dim)
        query = torch.randn(size, generator=self.generator).to(self.device, self.dtype)
        out = torch.empty_like(query)

        def run(backend: str | None = None) -> None:
            ops.decode_attention(query, arena, shape, 0, table, scale=case.head_dim**-0.5, out=out, backend=backend)

        moved = case.sequences * case.tokens * shape.tile_bytes(kv_format) // kv_format.tile_tokens
        reference = self.seconds(lambda: run("reference"), 1) if against_reference else None
        seconds = self.seconds(run, self.repeats)
        return Row("decode", str(case), kv_format.name, seconds, reference, moved, moved / self.bandwidth)

    def prefill(self, case: Case, kv_format: KVFormat, new_tokens: int) -> Row:
        arena, shape, table = self.cache(case, kv_format)
        queries = case.sequences * new_tokens
        size = (queries, case.heads, case.head_dim)
        query = torch.randn(size, generator=self.generator).to(self.device, self.dtype)
        out = torch.empty_like(query)
        starts = torch.arange(0, queries + 1, new_tokens, dtype=torch.int32, device=self.device)
        table = TableView(table.entries, table.num_entries, table.query_first - new_tokens + 1)

        def run(backend: str | None = None) -> None:
            ops.prefill_attention(
                query, arena, shape, 0, table, starts, scale=case.head_dim**-0.5, out=out, backend=backend
            )

        moved = case.sequences * case.tokens * shape.tile_bytes(kv_format) // kv_format.tile_tokens
        seconds, reference = self.seconds(run, self.repeats), self.seconds(lambda: run("reference"), 1)
        return Row(f"prefill {new_tokens}", str(case), kv_format.name, seconds, reference, moved, None)

    def recode(self, target: KVFormat, tokens: int = 4096) -> Row:
        """Native tiles of a 6-layer group to ``target``."""
        shape = KVShape(6, 2, 64, self.dtype.itemsize)
        # With 2-byte elements a quantised tile of 32 tokens may be larger than a native one of 16.
        units, target_units = (-(-shape.tile_stride(kind) // OFFSET_UNIT) for kind in (NATIVE, target))
        count = tokens // 32
        elements = count * (2 * units + target_units) * OFFSET_UNIT // self.dtype.itemsize
        arena = torch.randn(elements, generator=self.generator).to(self.dtype).view(torch.uint8).to(self.device)
        jobs = torch.zeros((count, JOB_WIDTH), dtype=torch.int32)
        for i in range(count):
            offset = 2 * count * units + i * target_units
            jobs[i] = torch.tensor((target.code, offset, 0, 0, 2 * i * units, 0, (2 * i + 1) * units, 0))
        jobs = jobs.to(self.device)

        def run(backend: str | None = None) -> None:
            ops.recode(arena, shape, jobs, native_dtype=self.dtype, backend=backend)

        moved = count * (2 * shape.tile_stride(NATIVE) + shape.tile_stride(target))
        seconds, reference = self.seconds(run, self.repeats), self.seconds(lambda: run("reference"), 1)
        return Row("recode", f"{tokens} tokens, 6 layers, 2 heads of 64", target.name, seconds, reference, moved, None)


def show(row: Row) -> None:
    text = f"{row.operation:12s} {row.case:44s} {row.kv_format:7s} {row.seconds * 1e3:9.3f} ms"
    text += f"  {row.bytes_moved / row.seconds / 1e9:7.1f} GB/s"
    if row.bound_s is not None:
        text += f"  memory's bound {row.bound_s * 1e3:8.3f} ms ({row.bound_s / row.seconds:4.0%})"
    if row.reference_s is not None:
        text += f"  reference {row.reference_s * 1e3:9.1f} ms ({row.reference_s / row.seconds:.0f} x)"
    print(text, flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", choices=sorted(_DTYPES), help="native dtype")
    parser.add_argument("--repeats", type=int, default=10, help="the best one counts (default: %(default)s)")
    parser.add_argument("--large", action="store_true", help="add 16 x 2,048 tokens, 32/8 heads of 128")
    options = parser.parse_args(arguments)
    started = time.perf_counter()
    bench = Bench(torch.device(options.device), _DTYPES[options.dtype], options.repeats)
    print(f"{options.device}, {options.dtype}, {torch.get_num_threads()} threads; a sum reads", end=" ")
    print(f"{bench.bandwidth / 1e9:.1f} GB/s; kernels ready after {bench.warm_up_s:.1f} s (compiled or from disk)")
    print("Decode is bound by reading what is stored, once: bytes / bandwidth.\n")
    cases = [Case(32, 600, 8, 4, 32), Case(8, 4096, 8, 2, 64)]
    rows: list[Row] = []
    for case in [*cases, Case(16, 2048, 32, 8, 128)] if options.large else cases:
        for kv_format in FORMATS:
            rows.append(bench.decode(case, kv_format, against_reference=case.sequences * case.tokens < 1 << 15))
            show(rows[-1])
    for new_tokens in (1, 64, 512):
        rows.append(bench.prefill(Case(1, 1024, 8, 2, 64), INT8, new_tokens))
        show(rows[-1])
    for kv_format in FORMATS[1:]:
        rows.append(bench.recode(kv_format))
        show(rows[-1])
    result = {
        "bench": "kernels",
        "device": torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or "cpu",
        "dtype": options.dtype,
        "threads": torch.get_num_threads(),
        "bandwidth_bytes_per_s": bench.bandwidth,
        "warm_up_s": bench.warm_up_s,
        "versions": {"kernels": kernels.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "rows": [asdict(row) for row in rows],
        "wall_s": time.perf_counter() - started,
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
