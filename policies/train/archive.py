"""Weights out of a Stable-Baselines3 zip without its pickles: tensors alone are read, the rest is in the recipe."""

from __future__ import annotations

import io
import pickle
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from policies.card import PolicyFileError, Tensors

POLICY: Final = "policy.pth"
OPTIMIZER: Final = "policy.optimizer.pth"
MAX_ENTRY_BYTES: Final = 64 << 20
_HIDDEN: Final = {
    "ppo": "mlp_extractor.policy_net.",
    "maskable-ppo": "mlp_extractor.policy_net.",
    "dqn": "q_net.q_net.",
}


def read_states(path: Path, names: tuple[str, ...] = (POLICY,)) -> dict[str, dict[str, Any]]:
    """State dictionaries by entry name. Raises PolicyFileError, one line.

    ``torch.load(weights_only=True)`` knows tensors and plain containers and refuses everything else, code above all.
    The entries ``data`` and ``pytorch_variables.pth``, which ``load`` of Stable-Baselines3 unpickles, are not opened.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return {name: _state(path, archive, name) for name in names}
    except OSError as error:
        raise PolicyFileError(f"{path}: {error.strerror or error}") from error
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError) as error:
        raise PolicyFileError(f"{path}: no usable zip: {_line(error)}") from error


def _state(path: Path, archive: zipfile.ZipFile, name: str) -> dict[str, Any]:
    try:
        info = archive.getinfo(name)
    except KeyError:
        raise PolicyFileError(f"{path}: no model of Stable-Baselines3: {name} is missing") from None
    if info.file_size > MAX_ENTRY_BYTES:
        raise PolicyFileError(f"{path}: {name} is larger than {MAX_ENTRY_BYTES} bytes")
    with archive.open(info) as entry:
        data = entry.read(MAX_ENTRY_BYTES + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, KeyError, TypeError, AttributeError) as error:
        raise PolicyFileError(f"{path}: {name} holds more than weights, or none: {_line(error)}") from error
    if not isinstance(state, dict):
        raise PolicyFileError(f"{path}: {name} is no state dictionary")
    return state


def actor_tensors(algo: str, state: Mapping[str, Any]) -> Tensors:
    """The layers that decide, float32, by the names in :class:`policies.card.Network`. Raises PolicyFileError."""
    prefix = _HIDDEN[algo]
    numbers = [name.removeprefix(prefix).removesuffix(".weight") for name in state if name.startswith(prefix)]
    layers = [f"{prefix}{number}" for number in sorted({int(number) for number in numbers if number.isdecimal()})]
    if algo != "dqn":
        layers.append("action_net")
    tensors: Tensors = {}
    for index, layer in enumerate(layers):
        for part in ("weight", "bias"):
            tensor = state.get(f"{layer}.{part}")
            if not isinstance(tensor, torch.Tensor):
                raise PolicyFileError(f"the model has no {layer}.{part}: it is no multilayer perceptron of {algo}")
            tensors[f"{index}.{part}"] = tensor.detach().numpy().astype(np.float32)
    return tensors


def _line(error: object) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__
