"""Claims that are arithmetic: what models of a published shape need. The memory model is the engine's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from engine.memory_model import sequence_bytes
from engine.models.config import ModelConfig
from engine.models.groups import layer_groups
from engine.models.parameters import Parameters, count_parameters
from engine.models.registry import parse_config

_HALF: Final = 2  # bytes of a number in 16 bits


@dataclass(frozen=True)
class PublicModel:
    """A model as its config.json describes it; weights and KV in 16 bits."""

    name: str
    config: ModelConfig

    @property
    def parameters(self) -> Parameters:
        return count_parameters(self.config)

    def kv_bytes(self, tokens: int) -> int:
        """Of one sequence in native blocks of 16."""
        return sequence_bytes(layer_groups(self.config, _HALF), tokens, "native", 16)

    def sessions(self, device_bytes: float, tokens: int, usable: float) -> int:
        """How many sequences of ``tokens`` a device holds beside the weights; negative: these alone do not fit."""
        return int((usable * device_bytes - self.parameters.weight_bytes(_HALF)) // self.kv_bytes(tokens))


def _llama(name: str, layers: int, hidden: int, inner: int, heads: int, kv_heads: int, vocabulary: int) -> PublicModel:
    """By the keys of its config.json that sizes depend on."""
    keys = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
    }
    return PublicModel(name, parse_config(keys))


LLAMA_2_7B: Final = _llama("Llama 2 7B", 32, 4096, 11_008, 32, 32, 32_000)
LLAMA_2_13B: Final = _llama("Llama 2 13B", 40, 5120, 13_824, 40, 40, 32_000)
LLAMA_3_8B: Final = _llama("Llama 3 8B", 32, 4096, 14_336, 32, 8, 128_256)
