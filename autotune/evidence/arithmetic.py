"""Claims that are arithmetic: what models of a published shape need. The memory model is the engine's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from engine.formats import KVShape
from engine.memory_model import GroupSpec, sequence_bytes

_HALF: Final = 2  # bytes of a number in 16 bits


@dataclass(frozen=True)
class PublicModel:
    """A model as its config.json and its authors describe it; weights in 16 bits."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    parameters: float

    @property
    def weight_bytes(self) -> float:
        return _HALF * self.parameters

    def kv_bytes(self, tokens: int) -> int:
        """Of one sequence in native blocks of 16."""
        shape = KVShape(self.layers, self.kv_heads, self.head_dim, _HALF)
        return sequence_bytes([GroupSpec("all", tuple(range(self.layers)), shape)], tokens, "native", 16)

    def sessions(self, device_bytes: float, tokens: int, usable: float) -> int:
        """How many sequences of ``tokens`` a device holds beside the weights; negative: these alone do not fit."""
        return int((usable * device_bytes - self.weight_bytes) // self.kv_bytes(tokens))


LLAMA_2_7B: Final = PublicModel("Llama 2 7B", 32, 32, 128, 6.74e9)
LLAMA_2_13B: Final = PublicModel("Llama 2 13B", 40, 40, 128, 13.02e9)
LLAMA_3_8B: Final = PublicModel("Llama 3 8B", 32, 8, 128, 8.03e9)
