"""What torch says of itself, asked in a process of its own: importing it takes seconds and hundreds of megabytes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any, Final

from engine.json_text import load_json

_PROGRAM: Final = """
import json, sys
try:
    import torch
except Exception as error:
    name = getattr(error, "name", None)
    missing = isinstance(error, ModuleNotFoundError) and name == "torch"
    print(json.dumps({"missing": missing, "error": f"{type(error).__name__}: {error}"}))
    sys.exit()
facts = {"version": torch.__version__, "cuda": torch.version.cuda, "hip": getattr(torch.version, "hip", None)}
facts["available"] = torch.cuda.is_available()
facts["arches"] = torch.cuda.get_arch_list() if facts["available"] else []
facts["devices"] = [
    {
        "name": torch.cuda.get_device_name(index),
        "capability": list(torch.cuda.get_device_capability(index)),
        "memory_bytes": torch.cuda.get_device_properties(index).total_memory,
    }
    for index in range(torch.cuda.device_count() if facts["available"] else 0)
]
try:
    import triton
    facts["triton"] = triton.__version__
except Exception as error:
    facts["triton"] = None
print(json.dumps(facts))
"""
_PATIENCE_S: Final = 120.0
_MOST_SAID: Final = 300


@dataclass(frozen=True)
class Device:
    """A GPU as torch sees it. ``capability``: major and minor."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int


@dataclass(frozen=True)
class TorchFacts:
    """``error``: why torch cannot be imported, None if it can; ``is_missing``: because it is not installed. ``cuda``:
    the CUDA version that it was built for, None for a build without. ``said``: what it wrote to stderr meanwhile.
    """

    version: str = ""
    cuda: str | None = None
    is_available: bool = False
    devices: tuple[Device, ...] = ()
    arches: tuple[str, ...] = ()
    triton: str | None = None
    error: str | None = None
    is_missing: bool = False
    said: str = field(default="", compare=False)


def ask_torch(python: str = sys.executable) -> TorchFacts:
    """Start ``python`` and have it tell. Never raises."""
    try:
        done = subprocess.run(  # noqa: S603  # our own program, no outside text in it
            [python, "-c", _PROGRAM], capture_output=True, text=True, timeout=_PATIENCE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return TorchFacts(error=f"asking torch failed: {error}")
    lines = done.stdout.strip().splitlines()
    said = " ".join(done.stderr.split())[-_MOST_SAID:]
    try:
        return facts_of(load_json(lines[-1]), said)
    except (IndexError, ValueError, KeyError, TypeError):
        return TorchFacts(error=f"importing torch ended the process (exit code {done.returncode}): {said}", said=said)


def facts_of(told: dict[str, Any], said: str = "") -> TorchFacts:
    """The facts in what the program printed."""
    if "error" in told:
        return TorchFacts(error=str(told["error"]), is_missing=bool(told["missing"]), said=said)
    devices = tuple(
        Device(row["name"], (row["capability"][0], row["capability"][1]), row["memory_bytes"])
        for row in told["devices"]
    )
    return TorchFacts(
        version=told["version"],
        cuda=told["cuda"],
        is_available=told["available"],
        devices=devices,
        arches=tuple(told["arches"]),
        triton=told["triton"],
        said=said,
    )
