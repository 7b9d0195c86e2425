# mypy: disable-error-code="no-untyped-def, no-any-return, untyped-decorator"
# ruff: noqa: ANN001, ANN202 - device code: types are Triton's, given by the arguments
"""Store new tokens' keys and values in native tiles."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.layout import KVShape
from kernels.triton.launch import adjacent_channels
from kernels.triton.tiles import HALF_WINDOW, NATIVE, element_bytes, head_address, head_part


@triton.jit(do_not_specialize=["layer"])
def _write_kv_kernel(
    key, value, slots, arena, layer, stride_key, stride_key_head, stride_value, stride_value_head,
    LAYERS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_LANES: tl.constexpr, DIM: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    native_dtype: tl.constexpr = key.dtype.element_ty
    element: tl.constexpr = element_bytes(native_dtype)
    part_v: tl.constexpr = head_part(NATIVE, "v", DIM, element)
    token = tl.program_id(0).to(tl.int64)
    offset = tl.load(slots + token * 2)
    index = tl.load(slots + token * 2 + 1)
    head = tl.arange(0, HEAD_LANES)[:, None]
    channel = tl.arange(0, LANES)[None, :]
    mask = (head < KV_HEADS) & (channel < DIM)
    address = head_address(offset, index // HALF_WINDOW, layer, head, NATIVE, LAYERS, KV_HEADS, DIM, element)
    at = (arena + address).to(tl.pointer_type(native_dtype)) + (index % HALF_WINDOW) * DIM + channel
    new_key = tl.load(key + token * stride_key + head * stride_key_head + channel, mask=mask)
    new_value = tl.load(value + token * stride_value + head * stride_value_head + channel, mask=mask)
    tl.store(at, new_key, mask=mask)
    tl.store(at + part_v // element, new_value, mask=mask)


def write_constants(shape: KVShape) -> dict[str, int]:
    """Compile-time constants (also for ahead-of-time compilation)."""
    return {
        "LAYERS": shape.num_layers,
        "KV_HEADS": shape.num_kv_heads,
        "HEAD_LANES": triton.next_power_of_2(shape.num_kv_heads),
        "DIM": shape.head_dim,
        "LANES": triton.next_power_of_2(shape.head_dim),
    }


def write_kv_launcher(
    arena: torch.Tensor, shape: KVShape, layer: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
) -> None:
    """Launch the kernel; allocates nothing and does not wait."""
    _write_kv_kernel[(key.shape[0],)](
        key, value, slots, arena, layer, key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        **write_constants(shape), num_warps=4, num_stages=1,
    )  # fmt: skip


def write_kv(
    arena: torch.Tensor, shape: KVShape, layer: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
) -> None:
    """Store new tokens; see :func:`kernels.ops.write_kv`. Strided inputs are copied only if channels are apart."""
    if key.shape[0]:
        key, value = adjacent_channels(key), adjacent_channels(value)
        write_kv_launcher(arena, shape, layer, key, value, slots.contiguous())
