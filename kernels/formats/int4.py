"""4 bits for keys and values: about a quarter of a 2-byte dtype, for when memory decides."""

from __future__ import annotations

from kernels.formats.base import FormatDeclaration

FORMAT = FormatDeclaration("int4", bits_k=4, bits_v=4, expected_loss=0.027)
