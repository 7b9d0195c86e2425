"""What a storage format is. Stdlib only."""

from __future__ import annotations

from dataclasses import dataclass

NATIVE_TILE_TOKENS = 16
QUANT_TILE_TOKENS = 32
# Bits per code that every backend stores and reads.
CODE_BITS = (4, 8)


@dataclass(frozen=True)
class FormatDeclaration:
    """What a format's file states, in a constant ``FORMAT``.

    Attributes:
        name: what users write, e.g. in ``kv_format``; lower-case letters and digits.
        bits_k: bits of a key code, 4 or 8; 0 for keys in the native dtype, as only ``native`` has them.
        bits_v: bits of a value code, likewise.
        expected_loss: relative increase of perplexity to expect when all KV is stored so (0.012: 1.2 %), from published
            figures or measurement; different from every other format's. It orders the formats, mildest first.
    """

    name: str
    bits_k: int
    bits_v: int
    expected_loss: float


@dataclass(frozen=True)
class KVFormat:
    """A storage format. ``bits_k``/``bits_v`` of 0 mean the native dtype; ``code`` is what entries carry.

    ``lossiness`` orders formats: recoding only ever moves to a larger one. It and ``code`` are the format's place in
    ``kernels.layout.FORMATS``: they hold within one process, and are never stored. ``expected_loss``: as declared.
    """

    name: str
    code: int
    bits_k: int
    bits_v: int
    lossiness: int
    expected_loss: float

    @property
    def is_native(self) -> bool:
        return self.bits_k == 0

    @property
    def tile_tokens(self) -> int:
        return NATIVE_TILE_TOKENS if self.is_native else QUANT_TILE_TOKENS
