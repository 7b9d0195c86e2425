"""The machine that is planned for, and how its memory is shared out. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from engine.default_pool import default_pool_bytes
from engine.errors import EngineError
from engine.models.parameters import Parameters
from engine.sizes import format_size, parse_size
from engine.stream_layout import STAGING_PART
from envs.analytic import DEVICES, DataSheet

CPU: Final = "cpu"
_CORES: Final = 2
"""One thread drives the steps, others serve HTTP; the daemon's unit may take a quarter of one besides."""

# Estimates, and said to be wherever they count.
GPU_RUNTIME_BYTES: Final = 1 << 30  # context, kernels and libraries in the GPU's memory
_PROCESS_BYTES: Final[Mapping[bool, int]] = MappingProxyType({True: 4 << 30, False: 1 << 30})  # by whether there is one
DAEMON_BYTES: Final = 256 << 20  # what its unit may take at most


@dataclass(frozen=True)
class Machine:
    """``memory_bytes``: where weights and KV lie, a GPU's memory or the host's. ``host_bytes`` and ``cores``: None
    where nobody said.
    """

    device: str
    memory_bytes: int
    sheet: DataSheet | None = None
    host_bytes: int | None = None
    cores: int | None = None

    @property
    def is_gpu(self) -> bool:
        return self.device != CPU


@dataclass(frozen=True)
class Memory:
    """How a machine's memory is shared out, in bytes. ``runtime`` is estimated; ``pool``: what the KV pool may take in
    all, with ``staging`` out of it for streaming from the host; ``left`` for activations and all else, negative where
    weights and pool do not fit.
    """

    total: int
    runtime: int
    weights: int
    packed: int
    pool: int
    staging: int
    host_pool: int
    is_host_apart: bool  # a GPU has memory of its own

    @property
    def free(self) -> int:
        """With the weights in place."""
        return self.total - self.runtime - self.weights - self.packed

    @property
    def left(self) -> int:
        return self.free - self.pool - (0 if self.is_host_apart else self.host_pool)


def machine_of(gpu: str, host_bytes: int | None, cores: int | None) -> Machine:
    """``gpu``: a known name, a size, or ``cpu``, which is this machine where nothing else is said.

    Raises EngineError for anything else.
    """
    known = {name.lower(): name for name in DEVICES}
    name = gpu.strip().lower()
    if name == CPU:
        memory = host_bytes or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return Machine(CPU, memory, None, memory, cores or os.cpu_count())
    if name in known:
        sheet = DEVICES[known[name]]
        return Machine(known[name], int(sheet.memory_bytes), sheet, host_bytes, cores)
    try:
        size = parse_size(gpu)
    except ValueError:
        raise EngineError(
            f"--gpu {gpu[:40]!r} is not known; give one of {', '.join(DEVICES)}, a size such as 24G, or cpu"
        ) from None
    return Machine(f"GPU of {format_size(size)}", size, None, host_bytes, cores)


def share_out(
    machine: Machine, parameters: Parameters, element_bytes: int, pool_bytes: int | None, host_pool_bytes: int
) -> Memory:
    """As the engine does it at its start. ``pool_bytes``: None for its own choice."""
    weights = parameters.weight_bytes(element_bytes)
    packed = 0 if machine.is_gpu else parameters.packed_bytes(element_bytes)
    runtime = GPU_RUNTIME_BYTES if machine.is_gpu else _PROCESS_BYTES[False] + DAEMON_BYTES
    free = machine.memory_bytes - runtime - weights - packed - (0 if machine.is_gpu else host_pool_bytes)
    pool = pool_bytes or max(0, default_pool_bytes(free, is_gpu=machine.is_gpu))
    staging = pool // STAGING_PART if host_pool_bytes else 0
    return Memory(
        machine.memory_bytes, runtime, weights, packed, pool, staging, host_pool_bytes, is_host_apart=machine.is_gpu
    )


def host_bytes_needed(machine: Machine, memory: Memory) -> int:
    """Of host memory, in part *estimated*: processes, the host pool, and without a GPU all else."""
    if not machine.is_gpu:
        return memory.total - memory.left
    return _PROCESS_BYTES[True] + DAEMON_BYTES + memory.host_pool


def cores_needed() -> int:
    """Processor cores below which HTTP and steps get into each other's way; *estimated*."""
    return _CORES
