"""The dtypes that a model can run in, by name. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from engine.errors import EngineError

DTYPE_BYTES: Final[Mapping[str, int]] = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2})
"""Bytes of an element, of weights and of native KV alike."""


def resolve_dtype(name: str, asked_by_file: str | None) -> str:
    """``auto`` means what the file asks for, else bfloat16. Raises EngineError for other names."""
    chosen = (asked_by_file or "bfloat16") if name == "auto" else name
    if chosen not in DTYPE_BYTES:
        raise EngineError(f"dtype {chosen[:40]!r} is not offered; choose one of {', '.join(DTYPE_BYTES)} with --dtype")
    return chosen
