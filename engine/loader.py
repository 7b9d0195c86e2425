"""From a Hugging Face model folder to a decoder ready to run: safetensors in, fused weights out, no transformers.

Everything that can be wrong with a folder ends in an EngineError of one line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import EngineError
from engine.memory_model import GroupSpec
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.dtypes import resolve_dtype
from engine.models.folder import read_config, read_json, weight_files
from engine.models.fused_decoder import make_decoder
from engine.models.groups import layer_groups
from engine.models.registry import parse_config
from engine.models.weights import allocate, destinations


@dataclass
class LoadedModel:
    """A model ready to run. ``groups``: layers by attention window and protection, in order of their first layer."""

    folder: Path
    config: ModelConfig
    model: Decoder
    groups: list[GroupSpec]
    eos_token_ids: frozenset[int]

    @property
    def name(self) -> str:
        return self.folder.resolve().name


def load_model(
    folder: str | Path, device: str = "cpu", dtype: str = "auto", *, protect_layers: int = 0, fuse: bool = True
) -> LoadedModel:
    """Read a model folder onto a device (``cpu``, ``cuda``, ``cuda:1``) in a dtype (``auto``: as the file says).

    ``protect_layers``: so many first layers keep their KV native whatever the ``kv_format``. ``fuse``: see
    :func:`engine.models.fused_decoder.make_decoder`.

    Raises EngineError: no such folder or file, an architecture or rope type that is not supported, a truncated file,
    tensors missing, unknown or of the wrong shape, an unavailable device, more layers to protect than there are.
    """
    path = Path(folder)
    raw = read_config(path)
    config = parse_config(raw)
    if not 0 <= protect_layers <= config.num_layers:
        raise EngineError(f"--protect-layers {protect_layers}: this model has {config.num_layers} layers")
    target = _device(device)
    torch_dtype: torch.dtype = getattr(torch, resolve_dtype(dtype, config.dtype))
    try:
        weights = allocate(config, target, torch_dtype)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        raise EngineError(
            f"the weights do not fit on {device} in {torch_dtype}; use a smaller model or dtype"
        ) from error
    wanted = {name: (tensor, shape) for name, tensor, shape in destinations(config, weights)}
    _fill(path, wanted, tied=config.tie_word_embeddings)
    eos = _generation_eos(path) or config.eos_token_ids
    groups = layer_groups(config, torch_dtype.itemsize, protect_layers)
    return LoadedModel(path, config, make_decoder(config, weights, fuse=fuse), groups, eos)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise EngineError(f"device {name!r} is not known to torch; use cpu or cuda") from error
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise EngineError(
            f"device {name!r} is not available here: torch sees {torch.cuda.device_count()} GPUs; use cpu"
        )
    if device.type not in {"cpu", "cuda"}:
        raise EngineError(f"device {name!r} is not supported; use cpu or cuda")
    return device


def _generation_eos(folder: Path) -> frozenset[int]:
    """End tokens of ``generation_config.json``: chat models list more there than in ``config.json``."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return frozenset()
    value = read_json(path).get("eos_token_id")
    ids = value if isinstance(value, list) else [value]
    return frozenset(token for token in ids if isinstance(token, int))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(str(path), framework="pt") as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        raise EngineError(f"{path} is truncated or not a safetensors file ({error}); download it again") from error


def _fill(folder: Path, wanted: Mapping[str, tuple[Tensor, tuple[int, ...]]], *, tied: bool) -> None:
    """Copy every wanted tensor from the folder's files to its place, converting dtype on the way."""
    filled: set[str] = set()
    unknown: list[str] = []
    for path in weight_files(folder):
        with _opened(path) as handle:
            for name in handle.keys():  # noqa: SIM118 -- a handle is no mapping
                if name not in wanted:
                    if not _is_redundant(name, tied=tied):
                        unknown.append(name)
                    continue
                target, shape = wanted[name]
                found = tuple(handle.get_slice(name).get_shape())
                if found != shape:
                    raise EngineError(
                        f"{path.name}: tensor {name} has shape {list(found)}, config.json asks for {list(shape)}; "
                        "weights and config.json do not belong together"
                    )
                target.copy_(handle.get_tensor(name))
                filled.add(name)
    missing = [name for name in wanted if name not in filled]
    if missing:
        raise EngineError(
            f"{folder}: {len(missing)} of {len(wanted)} tensors are missing from the weights, first {missing[0]}; "
            "weights and config.json do not belong together, or a file is missing"
        )
    if unknown:
        raise EngineError(
            f"{folder}: {len(unknown)} tensors in the weights are not part of the architecture, first {unknown[0]}; "
            "weights and config.json do not belong together"
        )


def _is_redundant(name: str, *, tied: bool) -> bool:
    """Tensors that some files carry though they follow from the configuration."""
    return name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")
