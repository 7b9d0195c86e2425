"""What the launchers share on the host: strides that kernels can take, compile-time constants, launch options."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.layout import ENTRY_WIDTH, KVShape
from kernels.table import TableView


def half_lanes(dim: int) -> int:
    """Lanes for half a head's channels: a power of two, at least 16 as tensor cores want it."""
    return int(max(16, triton.next_power_of_2(dim // 2)))


def longest_position(table: TableView) -> int:
    """Largest query position of a decode batch, or the host's bound where there is one (else this waits)."""
    return int(table.query_first.max()) if table.max_position is None else table.max_position


def adjacent_channels(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy, with the last dimension contiguous; kernels take any other stride."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def adjacent_entries(table: TableView) -> TableView:
    """The table, or a copy, in which only the stride between sequences is free."""
    entries, counts, first = table.entries, table.num_entries, table.query_first
    if entries.stride()[1:] == (ENTRY_WIDTH, 1) and counts.is_contiguous() and first.is_contiguous():
        return table
    return replace(table, entries=entries.contiguous(), num_entries=counts.contiguous(), query_first=first.contiguous())


def attention_warps(shape: KVShape) -> int:
    """Warps of an attention program, so that a window of keys and values and the sums stay in registers."""
    return min(8, max(4, half_lanes(shape.head_dim) * shape.element_bytes // 32))


def bounded_options(shape: KVShape, registers: int) -> dict[str, int]:
    """Launch options of an attention program: warps, and for 2-byte dtypes a bound on registers per thread.

    Left to itself, ptxas aims at one more block per multiprocessor and spills a few bytes for it (Triton 3.6.0 and
    3.7.1). Programs of 8 warps take what they need: one block of them hides as much latency as two of 4.
    """
    warps = attention_warps(shape)
    options = {"num_warps": warps, "num_stages": 1}
    if shape.element_bytes == 2:
        options["maxnreg"] = registers if warps == 4 else 255
    return options


def architecture_of(device: torch.device) -> int:
    """Compute capability as in sm_90; 0 where there is none (under the interpreter)."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def triton_dtype(dtype: torch.dtype) -> tl.dtype:
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]


def storage_constants(shape: KVShape, native_dtype: torch.dtype) -> dict[str, Any]:
    """Compile-time constants of the kernels that see no tensor of the native dtype (recode, gather)."""
    return {
        "LAYERS": shape.num_layers,
        "KV_HEADS": shape.num_kv_heads,
        "DIM": shape.head_dim,
        "HALF": half_lanes(shape.head_dim),
        "NATIVE_DTYPE": triton_dtype(native_dtype),
    }
