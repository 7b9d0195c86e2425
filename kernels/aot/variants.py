# ruff: noqa: SLF001 - it names the private kernels
"""Every kernel with the constants that its launcher would give it for one model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kernels.layout import KVShape
from kernels.triton import (
    copy_bytes,
    decode_merge,
    decode_plan,
    decode_split,
    gather,
    mass_passes,
    prefill_attention,
    recode,
    write_kv,
)
from kernels.triton.launch import attention_warps, storage_constants


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
        return f"{self.kernel} {dtype_name(self.dtype)} dim {self.head_dim} group {self.group}"


def variants(
    dtype: torch.dtype, head_dim: int, group: int, *, architecture: int = 90, kv_heads: int = 8, layers: int = 32
) -> list[Variant]:
    """Every kernel for one model shape, as launched on ``sm_<architecture>``."""
    shape = KVShape(layers, kv_heads, head_dim, dtype.itemsize)
    storage = storage_constants(shape, dtype)
    split, merge, prefill, mass = decode_split, decode_merge, prefill_attention, mass_passes
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


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
