"""The decoder on a CPU with packed weights: the same arithmetic as :class:`Decoder`, two kernel calls per layer instead
of some twenty of torch's, and one call for all layers where a step only decodes.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from engine.models.config import ModelConfig
from engine.models.decoder import Attention, Decoder
from engine.models.parameters import MOST_PACKED_BYTES
from engine.models.weights import DecoderWeights

if TYPE_CHECKING:
    from kernels.layout import KVShape


def make_decoder(config: ModelConfig, weights: DecoderWeights, *, fuse: bool = True) -> Decoder:
    """The fastest decoder for these weights here. ``fuse``: allow :class:`FusedDecoder`."""
    matrix_bytes = sum(
        matrix.nbytes for layer in weights.layers for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down)
    )
    small = weights.embedding.device.type == "cpu" and matrix_bytes + weights.head.nbytes <= MOST_PACKED_BYTES
    if not (fuse and small and importlib.util.find_spec("numba")):
        return Decoder(config, weights)
    from kernels.cpu.packed_weights import Sizes, can_pack  # noqa: PLC0415 - numba is optional

    sizes = Sizes(
        config.hidden_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.intermediate_size,
        config.vocab_size,
        config.rms_norm_eps,
    )
    if not can_pack(weights.embedding.dtype, sizes):
        return Decoder(config, weights)
    return FusedDecoder(config, weights, sizes)


class FusedDecoder(Decoder):
    """``weights`` stay as they are; the packed copy is made once."""

    products = "packed"

    def __init__(self, config: ModelConfig, weights: DecoderWeights, sizes: Any) -> None:
        """``sizes``: :class:`kernels.cpu.packed_weights.Sizes`."""
        from kernels.cpu.decode_attention import PreparedRows  # noqa: PLC0415 - numba is optional
        from kernels.cpu.packed_decoder import PackedDecoder  # noqa: PLC0415
        from kernels.cpu.packed_weights import PackedWeights  # noqa: PLC0415
        from kernels.cpu.tiles import elements_of  # noqa: PLC0415

        super().__init__(config, weights)
        self._elements_of = elements_of
        self._prepared_rows = PreparedRows
        self._packed = PackedDecoder(
            PackedWeights.of(weights.layers, weights.embedding, weights.final_norm, weights.head, sizes)
        )

    def warm_up(self) -> None:
        self._packed.warm_up()

    def hidden(self, ids: Tensor, positions: Tensor, end: int, attention: Attention) -> Tensor:
        config, tokens = self.config, len(ids)
        hidden = torch.nn.functional.embedding(ids, self.weights.embedding)
        query = hidden.new_empty((tokens, config.num_heads, config.head_dim))
        key_value = hidden.new_empty((tokens, 2 * config.num_kv_heads, config.head_dim))
        key, value = key_value[:, : config.num_kv_heads], key_value[:, config.num_kv_heads :]
        x, flat_query, flat_key_value = self._flat(hidden), self._flat(query), self._flat(key_value)
        rotary, where = self._rotary_arrays(end), positions.numpy().astype(np.int32, copy=False)
        for layer in range(config.num_layers):
            self._packed.before(layer, x, where, rotary, flat_query, flat_key_value)
            attended = attention(layer, query, key, value)
            self._packed.after(layer, x, self._flat(attended), tokens)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self._packed.logits(self._flat(hidden), np.arange(len(hidden), dtype=np.int64))

    def decode(
        self,
        ids: Tensor,
        positions: Tensor,
        end: int,
        arena: Tensor,
        shape: KVShape,
        rows: Any,
        slots: Tensor,
        *,
        scale: float,
        window: int,
    ) -> Tensor:
        """:meth:`hidden` of a step in which every sequence has one token, attention and writing KV included.

        ``shape``'s group holds all layers; ``rows``: what the CPU's ``plan_decode`` prepared for the table, whose
        row i belongs to token i; ``slots`` int32 [tokens, 2].
        """
        rotary = self._rotary_arrays(end)
        return self._packed.step(ids, positions, rotary, arena, shape, rows, slots, scale=scale, window=window)

    def can_decode(self, prepared: object) -> bool:
        """Whether :meth:`decode` takes this."""
        return isinstance(prepared, self._prepared_rows)

    def _flat(self, tensor: Tensor) -> Any:
        return self._elements_of(tensor, self.dtype).reshape(-1)

    def _rotary_arrays(self, end: int) -> tuple[Any, Any]:
        cos, sin = self._rotary.tables(end)
        return self._flat(cos), self._flat(sin)
