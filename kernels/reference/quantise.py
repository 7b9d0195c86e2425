"""THE quantisation formula. Every other kernel must give the same codes, scales and zero points, bit for bit.

Affine, over one group (keys: a channel over the tile's 32 tokens; values: a token over the head's channels; Liu et al.
2024, KIVI), all in float32 with IEEE division:

    zero  = min + 0.0                                               exact: a minimum is a native value; no -0.0
    scale = ((max * 0.5 - min * 0.5) / (levels * 0.5))              rounded UP to the native dtype
    code  = floor(((x * 0.5 - zero * 0.5) / scale) * 2 + 0.5)       clamped to 0 .. levels; 0 where scale is 0
    value = fma(scale, code, zero)                                  one rounding

The halves keep ranges wider than the dtype's largest value from overflowing; scaling by two is exact, so nothing else
changes. Rounding the scale up keeps the maximum within ``levels``. Constants have scale 0 and come back exactly. For
2-byte dtypes ``scale * code`` is exact in float32, so a fused and a separate multiply-add agree.

Requantising starts from dequantised values of the same groups. Code 0 occurs in every group, hence their minimum is
again the old zero point, exact in the native dtype, and one formula serves both.
"""

from __future__ import annotations

import torch

LEVELS = {8: 255, 4: 15}


def round_up(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Smallest ``dtype`` numbers that are >= ``values`` (float32, non-negative, finite after rounding)."""
    if dtype == torch.float32:
        return values
    nearest = values.to(dtype)
    # For non-negative floats the next larger one is the next integer of the same bits.
    bits = nearest.view(torch.int16) + (nearest.to(torch.float32) < values).to(torch.int16)
    return bits.view(dtype)


def quantise(
    values: torch.Tensor, bits: int, dim: int, native_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise finite float32 ``values`` in groups that run along ``dim``.

    Returns codes (uint8, the shape of ``values``, one code per byte also for 4 bits), scale and zero
    (``native_dtype``, ``dim`` kept with size 1). Raises KeyError for bits other than 8 and 4.
    """
    levels = LEVELS[bits]
    low = values.amin(dim, keepdim=True) + 0.0
    high = values.amax(dim, keepdim=True)
    scale = round_up((high * 0.5 - low * 0.5) / (levels * 0.5), native_dtype)
    wide = scale.to(torch.float32)
    ratio = (values * 0.5 - low * 0.5) / torch.where(wide > 0, wide, torch.inf)
    codes = torch.floor(ratio * 2 + 0.5).clamp_(0, levels).to(torch.uint8)
    return codes, scale, low.to(native_dtype)


def dequantise(
    codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """``zero + scale * code`` with one rounding to ``dtype`` (float32 or float64); constants broadcast."""
    # In float64 the product is exact and the sum is rounded at bit 53: rounding that to float32 is what fma gives.
    return (zero.to(torch.float64) + scale.to(torch.float64) * codes.to(torch.float64)).to(dtype)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """4-bit codes [..., head_dim] to bytes [..., head_dim / 2]: channel d low, channel d + head_dim / 2 high."""
    half = codes.shape[-1] // 2
    return codes[..., :half] | (codes[..., half:] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`pack_nibbles`."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)
