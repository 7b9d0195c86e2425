"""A profile from a device's data sheet and a model's configuration: *estimated* from end to end. No torch.

A step either waits for memory (weights and KV once) or computes (two operations per weight and token), whichever takes
longer (the roofline of Williams et al. 2009): the knee is where the two meet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from engine.formats import FORMATS, NATIVE
from engine.memory_model import token_bytes
from engine.models.config import ModelConfig
from engine.models.dtypes import DTYPE_BYTES
from engine.models.groups import layer_groups
from engine.models.parameters import count_parameters
from engine.step_counts import RECODES
from engine.transfers import HostLink
from envs.latency_model import LatencyModel
from envs.offload import crossover_tokens
from envs.profile import Device, Group, Latency, Model, Offload, Profile, Quality, capacities, terms
from envs.reward import literature_quality

_HALF: Final = 2  # bytes per weight
# Shares of the data sheet that good kernels reach, and times that no data sheet has. Guesses, and said to be.
MEMORY_SHARE: Final = 0.75
COMPUTE_SHARE: Final = 0.5
LINK_SHARE: Final = 0.8
_LAYER_S: Final = 8e-6  # launches per layer
_STEP_S: Final = 3e-4  # scheduling, sampling, synchronisation
_SEQUENCE_S: Final = 2e-6
_BLOCK_S: Final = 1e-9
_LOSSY_WORK: Final = 1.15  # unpacking on top of reading
_POOL_SHARE: Final = 0.9
_COPY_S: Final = 1e-5  # to start a copy over the host link


@dataclass(frozen=True)
class DataSheet:
    """Memory in bytes and bytes per second, dense bfloat16 operations per second, bytes per second to the host."""

    memory_bytes: float
    memory_bytes_per_s: float
    flops: float
    link_bytes_per_s: float


# NVIDIA's data sheets: H200 SXM, H100 SXM, A100 80 GB SXM, L4; dense figures, without sparsity.
DEVICES: Final[Mapping[str, DataSheet]] = MappingProxyType({
    "H200": DataSheet(141e9, 4.8e12, 989e12, 64e9),
    "H100": DataSheet(80e9, 3.35e12, 989e12, 64e9),
    "A100": DataSheet(80e9, 2.039e12, 312e12, 32e9),
    "L4": DataSheet(24e9, 300e9, 121e12, 32e9),
})  # fmt: skip


def parameters(config: ModelConfig) -> tuple[int, int]:
    """Weights of the layers and of the output head (which decoding reads too)."""
    found = count_parameters(config)
    return found.matrices, found.head or found.embedding


def analytic_seconds(config: ModelConfig, sheet: DataSheet) -> tuple[dict[str, float], int]:
    """Seconds per unit of every term, and the knee in tokens."""
    layers, head = parameters(config)
    bandwidth, flops = sheet.memory_bytes_per_s * MEMORY_SHARE, sheet.flops * COMPUTE_SHARE
    weights_s, token_s = _HALF * (layers + head) / bandwidth, 2 * layers / flops
    groups = layer_groups(config, _element_bytes(config))
    stored = {kind.name: token_bytes(groups[0].shape, kind) / len(groups[0].layers) for kind in FORMATS}
    native_s = stored[NATIVE.name] / bandwidth
    seconds = {
        "step": _STEP_S + config.num_layers * _LAYER_S + weights_s,
        "decode_sequence": _SEQUENCE_S,
        "token_beyond_knee": token_s,
        "prefill_sequence": _SEQUENCE_S,
        "prefill_pair": 4 * config.num_heads * config.head_dim / flops,
        "prefill_kv_native": native_s,
        "prefill_kv_lossy": native_s,
        "decode_block": _BLOCK_S,
        "sample": 2 * head / flops + 4 * config.vocab_size / bandwidth,
        "recode": config.num_layers * 1e-6,
    }
    for kind in FORMATS:
        work = 1.0 if kind.is_native else _LOSSY_WORK
        seconds[f"decode_kv_{kind.name}"] = work * stored[kind.name] / bandwidth
    for source, target in RECODES:
        seconds[f"recode_{source}_{target}"] = _LOSSY_WORK * (stored[source] + stored[target]) / bandwidth
    return seconds, max(1, round(weights_s / token_s))


def analytic_profile(
    config: ModelConfig,
    name: str,
    device: str,
    *,
    created: str,
    versions: dict[str, str],
    pool_bytes: int | None = None,
) -> Profile:
    """The profile of a model on one of ``DEVICES``. The pool takes what the weights leave of 90 % of the memory.

    Raises ValueError for an unknown device, and where the weights do not fit.
    """
    if device not in DEVICES:
        raise ValueError(f"device {device!r} is not known; choose one of {', '.join(DEVICES)}")
    sheet = DEVICES[device]
    layers, head = parameters(config)
    embedding = 0 if config.tie_word_embeddings else head
    weight_bytes = _HALF * (layers + head + embedding)
    pool = pool_bytes or int(sheet.memory_bytes * _POOL_SHARE) - weight_bytes
    if pool <= 0:
        raise ValueError(
            f"{name} has {weight_bytes / 1e9:.0f} GB of weights, {device} {sheet.memory_bytes / 1e9:.0f} GB"
        )
    groups = layer_groups(config, _element_bytes(config))
    seconds, knee = analytic_seconds(config, sheet)
    dtype = config.dtype or "bfloat16"
    rate = sheet.link_bytes_per_s * LINK_SHARE
    link = HostLink(rate, rate, copy_s=_COPY_S)
    return Profile(
        source="analytic",
        created=created,
        device=Device(name=device, bandwidth_bytes_per_s=sheet.memory_bytes_per_s),
        versions=versions,
        model=Model(
            name=name,
            architecture=config.architecture,
            dtype=dtype,
            max_model_len=config.max_model_len,
            vocab_size=config.vocab_size,
            groups=[Group.of(group) for group in groups],
        ),
        pool_bytes=pool,
        latency=Latency(knee_tokens=knee, terms=terms(seconds, estimated=True)),
        capacity=capacities(groups, pool),
        offload=Offload(
            bytes_per_s=link.in_bytes_per_s,
            transfer_s=link.copy_s,
            crossover_tokens=crossover_tokens(groups, LatencyModel(seconds, knee), link, config.max_model_len),
            estimated=True,
        ),
        quality=_published_quality(),
        notes=[_note(device)],
    )


def _published_quality() -> Quality:
    usual = literature_quality()
    return Quality(
        by_format=dict(usual.by_format), evicted=usual.evicted, evicted_by=dict(usual.evicted_by), estimated=True
    )


def _element_bytes(config: ModelConfig) -> int:
    return DTYPE_BYTES.get(config.dtype or "bfloat16", _HALF)


def _note(device: str) -> str:
    return (
        f"estimated from {device}'s data sheet: {MEMORY_SHARE:.0%} of its bandwidth, {COMPUTE_SHARE:.0%} of its "
        f"arithmetic, {LINK_SHARE:.0%} of its host link, and guessed launch times; nothing was measured"
    )
