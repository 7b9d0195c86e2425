"""8 bits for keys and values: about half of a 2-byte dtype, and hardly a difference in perplexity."""

from __future__ import annotations

from kernels.formats.base import FormatDeclaration

FORMAT = FormatDeclaration("int8", bits_k=8, bits_v=8, expected_loss=0.001)
