"""How many parameters a decoder has and what they take, from its configuration alone. No torch.

Counts what :mod:`engine.models.weights` allocates; a test holds the two together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from engine.models.config import ModelConfig

MOST_PACKED_BYTES: Final = 256 << 20
"""Matrices up to this size get a packed second copy on a CPU. Larger models are bound by reading their weights, which
one thread per row does not do fast enough; torch shares each product out.
"""


@dataclass(frozen=True)
class Parameters:
    """``embedding``, ``layers``, ``final_norm`` and ``head`` (0 where tied): elements in the checkpoint. ``matrices``:
    those of ``layers`` that are matrices. ``repeated``: elements that memory holds besides, as query and key norms are
    laid out once per head there.
    """

    embedding: int
    layers: int
    matrices: int
    final_norm: int
    head: int
    repeated: int

    @property
    def total(self) -> int:
        """Parameters of the model, as model cards count them."""
        return self.embedding + self.layers + self.final_norm + self.head

    def weight_bytes(self, element_bytes: int) -> int:
        """Bytes of the weights in memory."""
        return (self.total + self.repeated) * element_bytes

    def packed_bytes(self, element_bytes: int) -> int:
        """About the bytes of the packed copy that a CPU makes of a small model, 0 for one that is not small."""
        head = self.head or self.embedding
        if (self.matrices + head) * element_bytes > MOST_PACKED_BYTES:
            return 0
        return (self.layers + self.final_norm + head) * element_bytes


def count_parameters(config: ModelConfig) -> Parameters:
    """Exact for every family that the engine runs."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv, layers = config.query_size, config.kv_size, config.num_layers
    matrices = hidden * (query + 2 * kv) + query * hidden + 3 * hidden * inner
    vectors = 2 * hidden  # both norms
    vectors += (query + 2 * kv) * config.qkv_bias + hidden * config.output_bias
    vectors += (2 * inner + hidden) * config.mlp_bias
    norms = 2 * config.head_dim if config.qk_norm else 0
    repeated = (config.num_heads + config.num_kv_heads) * config.head_dim - norms if config.qk_norm else 0
    embedding = config.vocab_size * hidden
    return Parameters(
        embedding=embedding,
        layers=layers * (matrices + vectors + norms),
        matrices=layers * matrices,
        final_norm=hidden,
        head=0 if config.tie_word_embeddings else embedding,
        repeated=layers * repeated,
    )
