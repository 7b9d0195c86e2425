"""Keys and values in the model's own dtype: what new tokens are written in, and the only format that loses nothing."""

from __future__ import annotations

from kernels.formats.base import FormatDeclaration

FORMAT = FormatDeclaration("native", bits_k=0, bits_v=0, expected_loss=0.0)
