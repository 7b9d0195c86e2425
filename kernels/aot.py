# ruff: noqa: T201, SLF001 - a command: printing is its output; it compiles the private kernels
"""Compile every kernel for real GPUs without one, and report registers, spills and shared memory.

``python -m kernels.aot`` prints a table and, last, one JSON line; exit code 1 if a kernel spills or does not compile
(with ``--full`` it does: float32 at head_dim 256 does not fit the registers, which costs speed only).

The constants and alignments are those of the launchers for typical models; what a card does with the result is not
measured here.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from kernels.layout import KVShape
from kernels.triton import attention_mass, copy_bytes, decode_attention, gather, prefill_attention, recode, write_kv
from kernels.triton.tiles import attention_warps, storage_constants, triton_dtype

ARCHITECTURES = (80, 89, 90, 100)
_POINTERS = {
    "arena": "*u8", "entries": "*i32", "num_entries": "*i32", "query_first": "*i32", "query_starts": "*i32",
    "slots": "*i32", "jobs": "*i32", "starts": "*i64", "part_peak": "*fp32", "part_total": "*fp32",
    "part_sum": "*fp32", "rows": "*i64", "source": "*u8", "target": "*u8",
    "window_peak": "*fp32", "chunk_sum": "*fp32", "head_peak": "*fp32", "head_total": "*fp32", "row_peak": "*fp32",
    "row_total": "*fp32", "mass": "*fp32",
}  # fmt: skip
_NATIVE_POINTERS = {"query", "key", "value", "out"}


@dataclass(frozen=True)
class Variant:
    """One kernel with its launcher's constants, for one native dtype."""

    kernel: str
    function: Any
    constants: dict[str, Any]
    warps: int
    dtype: torch.dtype
    head_dim: int
    group: int

    def __str__(self) -> str:
        return f"{self.kernel} {_dtype_name(self.dtype)} dim {self.head_dim} group {self.group}"


@dataclass(frozen=True)
class Report:
    """What ptxas made of a variant. ``spill_bytes`` counts stores and loads; ``stack_bytes`` is per thread."""

    kernel: str
    dtype: str
    head_dim: int
    group: int
    architecture: int
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int


def variants(dtype: torch.dtype, head_dim: int, group: int, *, kv_heads: int = 8, layers: int = 32) -> list[Variant]:
    """Every kernel for one model shape."""
    shape = KVShape(layers, kv_heads, head_dim, dtype.itemsize)
    storage = storage_constants(shape, dtype)
    warps = attention_warps(shape)
    decode, prefill, mass = decode_attention, prefill_attention, attention_mass
    # What a launcher passes as None is a constant to the compiler.
    no_shares, no_heads = {"window_peak": None, "chunk_sum": None}, {"head_peak": None, "head_total": None}
    kernels: list[tuple[str, Any, dict[str, Any], int]] = [
        ("decode_split", decode._decode_split_kernel, decode.split_constants(shape, group) | no_shares, warps),
        ("decode_merge", decode._decode_merge_kernel, decode.merge_constants(shape, group) | no_heads, 4),
        ("split_mass", decode._decode_split_kernel, decode.split_constants(shape, group, mass=True), warps),
        ("merge_mass", decode._decode_merge_kernel, decode.merge_constants(shape, group, mass=True), 4),
        ("decode_mass", decode._decode_mass_kernel, decode.mass_constants(shape, group), 4),
        ("mass_totals", mass._mass_totals_kernel, mass.totals_constants(shape, group), warps),
        ("mass_shares", mass._mass_shares_kernel, mass.shares_constants(shape, group), warps),
        ("prefill", prefill._prefill_kernel, prefill.prefill_constants(shape, group), warps),
        ("write_kv", write_kv._write_kv_kernel, write_kv.write_constants(shape), 4),
        ("recode", recode._recode_kernel, storage, 4),
        ("gather_kv", gather._gather_kv_kernel, storage, 4),
        ("copy_bytes", copy_bytes._copy_bytes_kernel, copy_bytes.copy_constants(), 4),
    ]
    return [Variant(*kernel, dtype, head_dim, group) for kernel in kernels]


def compile_variant(variant: Variant, architecture: int) -> Report:
    """Compile for ``sm_<architecture>``. Raises what Triton raises when it cannot."""
    signature, attributes = {}, {}
    native = triton_dtype(variant.dtype).name
    # The gather kernel writes float32 whatever the native dtype is.
    tensor_type = "*fp32" if variant.kernel == "gather_kv" else f"*{native}"
    for index, parameter in enumerate(variant.function.params):
        name = parameter.name
        if name in variant.constants:
            signature[name] = "constexpr"
        elif name == "scale_log2":
            signature[name] = "fp32"
        elif name in _POINTERS or name in _NATIVE_POINTERS:
            signature[name] = _POINTERS.get(name, tensor_type)
            attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "i32"
            if name.startswith("stride"):
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(variant.function, signature, variant.constants, attributes)
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", architecture, 32),
        options={"num_warps": variant.warps, "num_stages": 1},
    )
    registers, spills, stack = _assemble(compiled.asm["ptx"], architecture)
    return Report(
        variant.kernel, _dtype_name(variant.dtype), variant.head_dim, variant.group, architecture,
        registers, spills, stack, compiled.metadata.shared,
    )  # fmt: skip


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _assemble(ptx: str, architecture: int) -> tuple[int, int, int]:
    """Registers per thread, bytes spilled (stores + loads), bytes of stack, from ``ptxas -v``."""
    target = re.search(r"\.target (sm_\w+)", ptx)
    if target is None:
        raise ValueError("PTX without a .target line")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx, encoding="utf-8")
        command = [get_ptxas(architecture).path, "-v", f"--gpu-name={target[1]}", str(source), "-o", f"{folder}/cubin"]
        log = subprocess.run(command, check=True, capture_output=True, text=True).stderr  # noqa: S603 - Triton's own
    spills = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = re.search(r"Used (\d+) registers", log)
    if spills is None or registers is None:
        raise ValueError(f"ptxas said nothing of registers: {log}")
    return int(registers[1]), int(spills[2]) + int(spills[3]), int(spills[1])


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile and report; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m kernels.aot", description=__doc__)
    parser.add_argument("--arch", type=int, nargs="+", default=list(ARCHITECTURES), help="compute capabilities")
    parser.add_argument("--full", action="store_true", help="every dtype and head size, not the typical few")
    options = parser.parse_args(arguments)
    reports: list[Report] = []
    failures: list[str] = []
    print(f"triton {triton.__version__}; nothing here was run on a GPU")
    print(f"{'kernel':<13} {'dtype':<9} {'dim':>4} {'group':>5} {'sm':>4} {'regs':>5} {'spill':>6} {'shared':>7}")
    for variant in _chosen(full=options.full):
        for architecture in options.arch:
            try:
                report = compile_variant(variant, architecture)
            except Exception as error:  # noqa: BLE001 - whatever the compiler raises is the finding
                failures.append(f"{variant} sm_{architecture}: {type(error).__name__}: {str(error)[:200]}")
                print(failures[-1], file=sys.stderr)
                continue
            reports.append(report)
            print(
                f"{report.kernel:<13} {report.dtype:<9} {report.head_dim:>4} {report.group:>5} {architecture:>4} "
                f"{report.registers:>5} {report.spill_bytes:>6} {report.shared_bytes:>7}",
                flush=True,
            )
    spilled = sum(report.spill_bytes > 0 for report in reports)
    result = {
        "triton": triton.__version__,
        "compiled": len(reports),
        "spilled": spilled,
        "failures": failures,
        "kernels": [asdict(report) for report in reports],
    }
    print(json.dumps(result))
    return 1 if failures or spilled else 0


def _chosen(*, full: bool) -> Iterator[Variant]:
    yield from variants(torch.bfloat16, 128, 4)
    yield from variants(torch.bfloat16, 64, 2)
    if full:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for head_dim, group in ((64, 1), (80, 1), (96, 4), (128, 8), (256, 2)):
                yield from variants(dtype, head_dim, group)


if __name__ == "__main__":
    sys.exit(main())
