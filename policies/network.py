"""Inference of an exported network with numpy. No torch."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from policies.card import Network, Normaliser, Tensors

MASKED: Final = np.float32(-1e8)  # what sb3-contrib puts in place of a masked logit


class Mlp:
    """Logits, or Q values, of an observation vector. Stateless after construction."""

    def __init__(self, network: Network, normaliser: Normaliser, tensors: Tensors) -> None:
        self._mean = np.array(normaliser.mean, dtype=np.float64)
        self._std = np.sqrt(np.array(normaliser.var, dtype=np.float64) + normaliser.epsilon)
        self._clip = normaliser.clip
        self._tanh = network.activation == "tanh"
        self._into = network.widths[0] - network.skip
        # Transposed once and laid out anew, so that one row times a matrix walks memory in order.
        self._layers = [
            (np.ascontiguousarray(tensors[f"{layer}.weight"].T), tensors[f"{layer}.bias"])
            for layer in range(len(network.widths) - 1)
        ]

    def __call__(self, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        """``vectors``: float32 [entries] or [rows, entries], not normalised. Returns float32, [actions] last."""
        inputs = np.clip((vectors - self._mean) / self._std, -self._clip, self._clip).astype(np.float32)
        hidden, past = inputs[..., : self._into], inputs[..., self._into :]
        for weight, bias in self._layers[:-1]:
            hidden = hidden @ weight + bias
            hidden = np.tanh(hidden) if self._tanh else np.maximum(hidden, 0)
        weight, bias = self._layers[-1]
        hidden = np.concatenate([hidden, past], axis=-1)
        return np.asarray(hidden @ weight + bias, dtype=np.float32)


def masked_argmax(values: NDArray[np.float32], mask: NDArray[np.int8]) -> int:
    """The best action that the mask allows, the first of equals: what the algorithm with masks takes."""
    return int(np.argmax(np.where(mask.astype(bool), values, MASKED)))


def probabilities(logits: NDArray[np.float32], mask: NDArray[np.int8]) -> NDArray[np.float64]:
    """Softmax over what the mask allows: float64 [actions]."""
    kept = np.where(mask.astype(bool), logits.astype(np.float64), -np.inf)
    weights = np.exp(kept - kept.max())
    return np.asarray(weights / weights.sum(), dtype=np.float64)
