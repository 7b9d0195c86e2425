"""How far a kernel may be from the float64 reference, per native dtype. Written once, used by every test."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tolerance:
    """``|got - want| <= atol + rtol * |want|`` for inputs of unit variance."""

    rtol: float
    atol: float


def attention_tolerance(dtype: torch.dtype) -> Tolerance:
    """Tolerance of attention outputs against the float64 reference over the same stored bytes.

    float32 kernels accumulate in float32 over up to a few thousand tokens. 2-byte outputs are rounded once (2^-9 and
    2^-12 relative), and a kernel may round its probabilities to the native dtype before the second product.

    Raises ValueError for a dtype that no arena is made of.
    """
    known = {
        torch.float32: Tolerance(rtol=1e-5, atol=1e-5),
        torch.bfloat16: Tolerance(rtol=1.6e-2, atol=1.6e-2),
        torch.float16: Tolerance(rtol=2e-3, atol=2e-3),
    }
    if dtype not in known:
        raise ValueError(f"no tolerance for {dtype}; native dtypes are float32, bfloat16 and float16")
    return known[dtype]


def mass_tolerance(dtype: torch.dtype) -> Tolerance:
    """Tolerance of shares of attention against the float64 reference, for inputs of unit variance.

    Shares are float32 sums whatever the native dtype is, but a kernel may round dequantised keys to the native dtype:
    then scores move by some 2^-9 (bfloat16) or 2^-12 (float16) of the products' size, and shares by as much of
    themselves. Nothing in it is absolute but float32's own rounding.

    Raises ValueError for a dtype that no arena is made of.
    """
    return Tolerance(rtol=attention_tolerance(dtype).rtol, atol=1e-6)


def storage_tolerance(dtype: torch.dtype, step: torch.Tensor, magnitude: torch.Tensor) -> torch.Tensor:
    """Largest allowed distance between a stored native value and its dequantised code, elementwise.

    Half a quantisation ``step`` (``(max - min) / levels``), enlarged by what rounding the scale up to the native
    dtype may add, plus float32 rounding at the group's ``magnitude`` (largest absolute value).
    """
    info = torch.finfo(dtype)
    return step * 0.5 * (1 + info.eps) + info.smallest_normal * info.eps + magnitude * 2.0**-22
