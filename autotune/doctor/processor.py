"""Whether this processor multiplies bfloat16 by itself, and what that means for a model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from autotune.doctor.finding import Finding, ok, warning
from autotune.doctor.probes import Probes
from engine.models.parameters import MOST_PACKED_BYTES
from engine.sizes import format_size

_CPUINFO: Final = Path("/proc/cpuinfo")
_FLAGS: Final = re.compile(r"^flags\s*:(.*)$", re.MULTILINE)  # x86 only: others call them features
_MULTIPLY: Final = ("avx512_bf16", "amx_bf16")  # bfloat16, as the kernel names it
_PACKED: Final = ({"avx512f"}, {"avx2", "fma"})  # what packed products are made for, as kernels.cpu.products has it
_LACKS: Final = "no instructions for products of bfloat16"


def check_processor(probes: Probes, engine: Mapping[str, str] | None) -> Iterator[Finding]:
    """On x86 alone. ``engine``: what the engine here says of itself, None where none does."""
    line = _FLAGS.search(probes.read(_CPUINFO) or "")
    if line is None:
        return
    flags = set(line[1].split())
    known = [flag for flag in _MULTIPLY if flag in flags]
    if known:
        yield ok("processor", f"multiplies bfloat16: {', '.join(known)}")
    elif engine is not None and {"device", "dtype", "products"} <= engine.keys():
        yield _for_engine(engine)
    else:
        yield ok("processor", f"{_LACKS}: {_in_general(flags)}")


def _for_engine(engine: Mapping[str, str]) -> Finding:
    model, dtype = engine["model"], engine["dtype"]
    if engine["device"] != "cpu":
        return ok("processor", f"{_LACKS}; {model} is on {engine['device']}")
    if engine["products"] == "packed":
        return ok("processor", f"{_LACKS}; {model} is served by packed products, which need none")
    if dtype != "bfloat16":
        return ok("processor", f"{_LACKS}; {model} is in {dtype}")
    return warning(
        "processor",
        f"{_LACKS}, and {model} is in bfloat16 and served without packed products",
        "start it with --dtype float32, if twice the memory for its weights and KV is there: several times faster",
    )


def _in_general(flags: set[str]) -> str:
    faster = "is several times faster with --dtype float32, if memory allows"
    if not any(needed <= flags for needed in _PACKED):
        return f"a bfloat16 model on it {faster}"
    most = format_size(MOST_PACKED_BYTES)
    return (
        "small models in float32 and bfloat16 are served by packed products, which need none; "
        f"a bfloat16 model with more than {most} of matrices {faster}"
    )
