# ruff: noqa: T201, SLF001 - a command: printing is its output; it compiles the private kernels
"""Compile every kernel for real GPUs without one: registers, spills, shared memory, blocks per multiprocessor.

``python -m kernels.aot`` prints a table and, last, one JSON line; exit code 1 if a kernel does not compile, spills, or
leaves a multiprocessor with fewer than two blocks, unless the report says why that is accepted.

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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from kernels.layout import KVShape
from kernels.triton import (
    attention_mass,
    copy_bytes,
    decode_merge,
    decode_plan,
    decode_split,
    gather,
    prefill_attention,
    recode,
    write_kv,
)
from kernels.triton.tiles import attention_warps, storage_constants, triton_dtype

ARCHITECTURES = (80, 89, 90, 100)
# Of a multiprocessor: warps, blocks, bytes of shared memory. All have 65,536 registers (CUDA's programming guide).
_LIMITS = {80: (64, 32, 164 << 10), 89: (48, 24, 100 << 10), 90: (64, 32, 228 << 10), 100: (64, 32, 228 << 10)}
_REGISTERS = 65536
# Why attention may leave one block, and in float32 spill: it costs speed only.
_FLOAT32 = "float32 products take three tf32 ones, whose operands fill the registers; on a GPU it is for comparisons"
_EIGHT_WARPS = "one block of 8 warps hides as much latency as two of 4"
_POINTERS = {
    "arena": "*u8", "entries": "*i32", "num_entries": "*i32", "query_first": "*i32", "query_starts": "*i32",
    "slots": "*i32", "jobs": "*i32", "starts": "*i64", "piece_starts": "*i32", "items": "*i32", "seen": "*i32",
    "part_peak": "*fp32", "part_total": "*fp32",
    "part_sum": "*fp32", "rows": "*i64", "source": "*u8", "target": "*u8",
    "window_peak": "*fp32", "chunk_sum": "*fp32", "head_peak": "*fp32", "head_total": "*fp32", "row_peak": "*fp32",
    "row_total": "*fp32", "mass": "*fp32",
}  # fmt: skip
_SHAPES = ((torch.bfloat16, 128, 4), (torch.bfloat16, 64, 2))  # dtype, head_dim, query heads per KV head
_MORE_SHAPES = tuple(
    (dtype, head_dim, group)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for head_dim, group in ((64, 1), (80, 1), (96, 4), (128, 8), (256, 2))
)
_NATIVE_POINTERS = {"query", "key", "value", "out"}


@dataclass(frozen=True)
class Variant:
    """One kernel with its launcher's constants, for one native dtype."""

    kernel: str
    function: Any
    constants: dict[str, Any]
    options: dict[str, int]
    dtype: torch.dtype
    head_dim: int
    group: int

    def __str__(self) -> str:
        return f"{self.kernel} {_dtype_name(self.dtype)} dim {self.head_dim} group {self.group}"


@dataclass(frozen=True)
class Report:
    """What ptxas made of a variant. ``spill_bytes`` counts stores and loads; ``stack_bytes`` is per thread.

    ``blocks``: how many fit on a multiprocessor at once; ``accepted``: why it may spill or be one.
    """

    kernel: str
    dtype: str
    head_dim: int
    group: int
    architecture: int
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    warps: int
    blocks: int
    accepted: str = ""

    @property
    def is_bad(self) -> bool:
        """Spills, or leaves nothing to hide latency behind, and nobody said why that is fine."""
        return not self.accepted and (self.spill_bytes > 0 or self.blocks < 2)


def variants(
    dtype: torch.dtype, head_dim: int, group: int, *, architecture: int = 90, kv_heads: int = 8, layers: int = 32
) -> list[Variant]:
    """Every kernel for one model shape, as launched on ``sm_<architecture>``."""
    shape = KVShape(layers, kv_heads, head_dim, dtype.itemsize)
    storage = storage_constants(shape, dtype)
    split, merge, prefill, mass = decode_split, decode_merge, prefill_attention, attention_mass
    plain, attention, decode = _options(4), _options(attention_warps(shape)), split.split_options(shape)
    shares, chunk = mass.shares_options(shape), _options(prefill.prefill_warps(shape, architecture))
    # What a launcher passes as None is a constant to the compiler.
    no_shares: dict[str, Any] = dict.fromkeys(("window_peak", "chunk_sum", "seen"))
    no_heads: dict[str, Any] = dict.fromkeys(("head_peak", "head_total"))
    kernels: list[tuple[str, Any, dict[str, Any], dict[str, int]]] = [
        ("decode_plan", decode_plan._decode_plan_kernel, {"SPLIT": decode_plan.SPLIT_TOKENS}, plain),
        ("decode_split", split._decode_split_kernel, split.split_constants(shape, group) | no_shares, decode),
        ("decode_merge", merge._decode_merge_kernel, merge.merge_constants(shape, group) | no_heads, plain),
        ("split_mass", split._decode_split_kernel, split.split_constants(shape, group, mass=True), decode),
        ("merge_mass", merge._decode_merge_kernel, merge.merge_constants(shape, group, mass=True), plain),
        ("decode_mass", merge._decode_mass_kernel, merge.mass_constants(shape, group), plain),
        ("mass_totals", mass._mass_totals_kernel, mass.totals_constants(shape, group), attention),
        ("mass_shares", mass._mass_shares_kernel, mass.shares_constants(shape, group), shares),
        ("prefill", prefill._prefill_kernel, prefill.prefill_constants(shape, group), chunk),
        ("write_kv", write_kv._write_kv_kernel, write_kv.write_constants(shape), plain),
        ("recode", recode._recode_kernel, storage, plain),
        ("gather_kv", gather._gather_kv_kernel, storage, plain),
        ("copy_bytes", copy_bytes._copy_bytes_kernel, copy_bytes.copy_constants(), plain),
    ]
    return [Variant(*kernel, dtype, head_dim, group) for kernel in kernels]


def _options(warps: int) -> dict[str, int]:
    return {"num_warps": warps, "num_stages": 1}


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
        options=variant.options,
    )
    registers, spills, stack = _assemble(compiled.asm["ptx"], architecture)
    shared, dtype = compiled.metadata.shared, _dtype_name(variant.dtype)
    blocks = blocks_per_multiprocessor(architecture, registers, variant.options["num_warps"], shared)
    why = ""
    if variant.dtype == torch.float32 and variant.head_dim > 64 and (spills or blocks < 2):
        why = _FLOAT32
    elif variant.options["num_warps"] == 8 and blocks == 1 and not spills:
        why = _EIGHT_WARPS
    return Report(
        variant.kernel, dtype, variant.head_dim, variant.group, architecture, registers, spills, stack, shared,
        variant.options["num_warps"], blocks, why,
    )  # fmt: skip


def blocks_per_multiprocessor(architecture: int, registers: int, warps: int, shared_bytes: int) -> int:
    """How many blocks (programs) of a kernel a multiprocessor holds; a block takes 1 KiB of shared memory besides."""
    most_warps, most_blocks, shared = _LIMITS[architecture]
    by_registers = _REGISTERS // (-(-registers // 8) * 8 * 32 * warps)
    return min(by_registers, most_warps // warps, most_blocks, shared // (shared_bytes + 1024))


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
