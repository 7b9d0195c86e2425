"""8-bit keys, 4-bit values: keys decide what is attended to, so that they bear less rounding than values."""

from __future__ import annotations

from kernels.formats.base import FormatDeclaration

FORMAT = FormatDeclaration("k8v4", bits_k=8, bits_v=4, expected_loss=0.012)
