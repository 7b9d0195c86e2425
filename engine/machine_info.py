"""Versions and device: what figures need beside them to be compared later."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

import kernels


def machine_info(device: str) -> dict[str, Any]:
    """``device`` by name, processor threads of torch, processors that may be used, ``versions``. Imports torch."""
    import torch  # noqa: PLC0415 - slow, and only a finished run needs it

    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.processor() or "cpu"
    versions = {"kv-autotune": importlib.metadata.version("kv-autotune"), "kernels": kernels.__version__}
    versions |= {"torch": torch.__version__, "python": platform.python_version()}
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "processors": len(os.sched_getaffinity(0)),
        "versions": versions,
    }


def about(device: str, dtype: str, torch_version: str, products: str) -> dict[str, str]:
    """What an engine is, for who looks after it. Without an installed distribution its version is not told.

    ``products``: see :class:`engine.models.decoder.Decoder`.
    """
    told = {"torch": torch_version, "device": device, "dtype": dtype, "products": products}
    try:
        return {"version": importlib.metadata.version("kv-autotune"), **told}
    except importlib.metadata.PackageNotFoundError:
        return told
