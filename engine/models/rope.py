"""Rotary position embeddings (Su et al. 2021) with linear, Llama 3 and YaRN scaling, in Hugging Face's conventions.

Frequencies are computed in float32 in the same order of operations as transformers, so that float32 outputs agree.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.models.rope_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Angular frequencies float32 [head_dim / 2] in radians per position, and the factor on cosine and sine."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    wavelengths = rope.theta**exponents  # over 2 pi
    inverse = 1.0 / wavelengths
    if rope.rope_type == "linear":
        return inverse / rope.factor, 1.0
    if rope.rope_type == "llama3":
        return _llama3(inverse, rope), 1.0
    if rope.rope_type == "yarn":
        return _yarn(wavelengths, rope, head_dim), _yarn_attention_factor(rope)
    return inverse, 1.0


def _llama3(inverse: Tensor, rope: RopeConfig) -> Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between interpolated (Llama 3.1)."""
    wavelength = 2 * math.pi / inverse
    low = rope.original_positions / rope.low_freq_factor
    high = rope.original_positions / rope.high_freq_factor
    scaled = torch.where(wavelength > low, inverse / rope.factor, inverse)
    smooth = (rope.original_positions / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - smooth) * scaled / rope.factor + smooth * scaled
    is_between = (wavelength >= high) & (wavelength <= low)
    return torch.where(is_between, between, scaled)


def _yarn(wavelengths: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """Interpolate slow dimensions, keep fast ones, ramp between (Peng et al. 2023, section 3.2)."""

    def dimension(rotations: float) -> float:
        return (head_dim * math.log(rope.original_positions / (rotations * 2 * math.pi))) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    keep = 1 - ramp
    return (1.0 / (rope.factor * wavelengths)) * (1 - keep) + (1.0 / wavelengths) * keep


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def temperature(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return temperature(rope.mscale) / temperature(rope.mscale_all_dim)
    return temperature(1.0)


class RotaryTable:
    """Cosines and sines of every position so far needed; grows by doubling, so short contexts cost no memory."""

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device, dtype: torch.dtype) -> None:
        self._frequencies, self._factor = inverse_frequencies(rope, head_dim)
        self._device = device
        self._dtype = dtype
        self._length = 0
        self._cos = self._sin = torch.empty(0)

    def at(self, positions: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """Cosine [tokens, 1, head_dim] (halves repeated), sine [tokens, 1, head_dim / 2] at positions < ``end``."""
        cos, sin = self.tables(end)
        return cos.index_select(0, positions).unsqueeze(1), sin.index_select(0, positions).unsqueeze(1)

    def tables(self, end: int) -> tuple[Tensor, Tensor]:
        """Cosines [positions, head_dim] (halves repeated), sines [positions, head_dim / 2], at least to ``end``."""
        if end > self._length:
            self._grow(end)
        return self._cos, self._sin

    def _grow(self, end: int) -> None:
        self._length = max(1024, 1 << (end - 1).bit_length())
        angles = torch.arange(self._length, dtype=torch.float32)[:, None] * self._frequencies
        cos, sin = angles.cos() * self._factor, angles.sin() * self._factor
        self._cos = torch.cat((cos, cos), dim=-1).to(self._device, self._dtype)
        self._sin = sin.to(self._device, self._dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads [tokens, heads, head_dim] by the table's rows; a new contiguous tensor of the same dtype."""
    half = heads.shape[-1] // 2
    rotated = heads * cos
    rotated[..., :half].addcmul_(heads[..., half:], sin, value=-1)
    rotated[..., half:].addcmul_(heads[..., :half], sin)
    return rotated
