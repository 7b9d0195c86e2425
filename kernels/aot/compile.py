"""One kernel compiled for one GPU, and what the assembler says of it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from kernels.aot.variants import Variant, dtype_name
from kernels.triton.launch import triton_dtype

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
_NATIVE_POINTERS = {"query", "key", "value", "out"}


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
    shared, dtype = compiled.metadata.shared, dtype_name(variant.dtype)
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
