"""What a set of kernels offers, and which set serves a device. A set is a package of functions of the same names."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import SimpleNamespace
from typing import Protocol, cast

import torch

from kernels.layout import KVShape
from kernels.table import TableView

BACKENDS = ("cpu", "triton", "reference")
# Operation: the file of a backend's package that defines it.
OPERATIONS = {
    "write_kv": "write_kv",
    "plan_decode": "decode_attention",
    "decode_attention": "decode_attention",
    "attention_mass": "attention_mass",
    "prefill_attention": "prefill_attention",
    "recode": "recode",
    "gather_kv": "gather",
    "copy_bytes": "copy_bytes",
}


class KernelBackend(Protocol):
    """One implementation of every operation, with the contracts of :mod:`kernels.ops`; arguments are valid."""

    def write_kv(
        self,
        arena: torch.Tensor,
        shape: KVShape,
        layer: int,
        key: torch.Tensor,
        value: torch.Tensor,
        slots: torch.Tensor,
    ) -> None: ...

    def plan_decode(
        self, table: TableView, shape: KVShape, heads: int, native_dtype: torch.dtype, *, window: int, mass: bool
    ) -> object:
        """What ``decode_attention`` takes as ``prepared``; None: nothing."""
        ...

    def decode_attention(
        self,
        query: torch.Tensor,
        arena: torch.Tensor,
        shape: KVShape,
        layer: int,
        table: TableView,
        *,
        scale: float,
        window: int = 0,
        out: torch.Tensor,
        mass: torch.Tensor | None = None,
        prepared: object = None,
    ) -> None: ...

    def attention_mass(
        self,
        query: torch.Tensor,
        arena: torch.Tensor,
        shape: KVShape,
        layer: int,
        table: TableView,
        query_starts: torch.Tensor,
        *,
        scale: float,
        window: int = 0,
        last: int,
        mass: torch.Tensor,
    ) -> None: ...

    def prefill_attention(
        self,
        query: torch.Tensor,
        arena: torch.Tensor,
        shape: KVShape,
        layer: int,
        table: TableView,
        query_starts: torch.Tensor,
        *,
        scale: float,
        window: int = 0,
        out: torch.Tensor,
    ) -> None: ...

    def recode(
        self, arena: torch.Tensor, shape: KVShape, jobs: torch.Tensor, *, native_dtype: torch.dtype | None = None
    ) -> None: ...

    def gather_kv(
        self,
        arena: torch.Tensor,
        shape: KVShape,
        layer: int,
        entries: torch.Tensor,
        num_entries: int,
        *,
        native_dtype: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def copy_bytes(self, source: torch.Tensor, target: torch.Tensor, rows: torch.Tensor) -> None: ...


def select_backend(device: torch.device, name: str | None = None) -> KernelBackend:
    """The backend called ``name``, or the fastest installed one for ``device``.

    Without a name: Triton on CUDA, Numba kernels on the CPU, and the reference where these are not installed. Raises
    ValueError for an unknown name or one that cannot serve the device.
    """
    if name is None:
        name = _fastest(device.type)
    if name not in BACKENDS:
        raise ValueError(f"unknown kernel backend {name!r}; known are {', '.join(BACKENDS)}")
    if name == "cpu" and device.type != "cpu":
        raise ValueError(f"backend 'cpu' does not serve tensors on {device}")
    return _load(name)


# Both are pure functions of what is installed; they are memoised because every operation may ask.
@functools.cache
def _fastest(device_type: str) -> str:
    fast, needs = ("triton", "triton") if device_type == "cuda" else ("cpu", "numba")
    return fast if importlib.util.find_spec(needs) else "reference"


@functools.cache
def _load(name: str) -> KernelBackend:
    package = f"kernels.{name}"
    if name == "triton":
        # Its package imports nothing by itself, so that its sources can be inspected without triton.
        operations = {op: getattr(importlib.import_module(f"{package}.{file}"), op) for op, file in OPERATIONS.items()}
        return cast("KernelBackend", SimpleNamespace(**operations))
    return cast("KernelBackend", importlib.import_module(package))
