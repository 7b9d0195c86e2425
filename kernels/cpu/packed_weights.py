"""A decoder's weights as the CPU kernels want them: one flat array, matrices in panels, and where each part begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kernels.cpu.dense import (
    DOWN,
    DOWN_BIAS,
    GATE,
    GATE_UP_BIAS,
    INPUT_NORM,
    OUTPUT,
    OUTPUT_BIAS,
    PLACES,
    POST_NORM,
    QK_NORM,
    QKV,
    QKV_BIAS,
    UP,
)
from kernels.cpu.products import HERE, PANEL, packed
from kernels.cpu.tiles import elements_of
from kernels.memory import zeroed

_DTYPES = (torch.float32, torch.bfloat16)


class Layer(Protocol):
    """One layer's tensors, matrices [outputs, inputs]; absent ones are None."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


@dataclass(frozen=True)
class Sizes:
    """Of a model. ``epsilon``: of its norms."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    epsilon: float


def can_pack(dtype: torch.dtype, sizes: Sizes) -> bool:
    """Whether this processor and these sizes suit the kernels: AVX2 or AVX-512, even inputs."""
    inputs = (sizes.hidden, sizes.heads * sizes.head_dim, sizes.intermediate, sizes.head_dim)
    return HERE is not None and dtype in _DTYPES and not any(size % 2 for size in inputs)


@dataclass(frozen=True)
class PackedWeights:
    """``flat``: native elements. ``places``: int64 [layers, PLACES], see :mod:`kernels.cpu.dense`; ``embedding`` flat,
    ``final_norm`` and ``head``: places of what follows the last layer.
    """

    flat: npt.NDArray[Any]
    places: npt.NDArray[np.int64]
    final_norm: int
    head: int
    embedding: npt.NDArray[Any]
    sizes: Sizes
    size_array: npt.NDArray[np.int64]

    @classmethod
    def of(
        cls,
        layers: Sequence[Layer],
        embedding: torch.Tensor,
        final_norm: torch.Tensor,
        head: torch.Tensor,
        sizes: Sizes,
    ) -> PackedWeights:
        """A packed copy (of all but the embedding, whose memory is shared). All tensors have one dtype, on the CPU."""
        parts: list[npt.NDArray[Any]] = []
        length = 0

        def put(tensor: torch.Tensor | None) -> int:
            """Where a tensor's elements are from now on; matrices are packed."""
            nonlocal length
            if tensor is None:
                return -1
            array = elements_of(tensor.contiguous(), tensor.dtype)
            part = packed(array) if array.ndim == 2 else array.reshape(-1)
            padding = -len(part) % PANEL
            parts.append(np.concatenate([part, np.zeros(padding, part.dtype)]))
            length += len(parts[-1])
            return length - len(parts[-1])

        places = np.full((len(layers), PLACES), -1, np.int64)
        for row, layer in zip(places, layers, strict=True):
            row[INPUT_NORM], row[POST_NORM] = put(layer.input_norm), put(layer.post_norm)
            row[QKV], row[QKV_BIAS] = put(layer.qkv), put(layer.qkv_bias)
            row[QK_NORM] = put(None if layer.qk_norm is None else layer.qk_norm.reshape(-1))
            row[OUTPUT], row[OUTPUT_BIAS] = put(layer.output), put(layer.output_bias)
            row[GATE] = put(layer.gate_up[: sizes.intermediate])
            row[UP] = put(layer.gate_up[sizes.intermediate :])
            row[GATE_UP_BIAS] = put(layer.gate_up_bias)
            row[DOWN], row[DOWN_BIAS] = put(layer.down), put(layer.down_bias)
        places_after = put(final_norm), put(head)
        size_array = np.array([sizes.hidden, sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.intermediate], np.int64)
        shared = elements_of(embedding, embedding.dtype).reshape(-1)
        flat = elements_of(zeroed(length * embedding.itemsize), embedding.dtype)
        np.concatenate(parts, out=flat)
        return cls(flat, places, *places_after, shared, sizes, size_array)
