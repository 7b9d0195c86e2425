"""Which model families can be run. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from engine.errors import EngineError
from engine.models import llama, mistral, qwen2, qwen3
from engine.models.config import ModelConfig

Parser = Callable[[Mapping[str, Any]], ModelConfig]

ARCHITECTURES: Final[Mapping[str, Parser]] = MappingProxyType(
    {module.ARCHITECTURE: module.parse for module in (llama, mistral, qwen2, qwen3)}
)


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """The decoder configuration of a raw ``config.json``.

    The architecture comes from ``architectures``, or from ``model_type`` where that is missing. Raises EngineError
    listing the supported ones.
    """
    names = raw.get("architectures")
    if not isinstance(names, list) or not names:
        model_type = str(raw.get("model_type", "")).lower()
        names = [name for name in ARCHITECTURES if name.lower() == f"{model_type}forcausallm"] or [model_type]
    for name in names:
        if isinstance(name, str) and name in ARCHITECTURES:
            return ARCHITECTURES[name](raw)
    asked = ", ".join(map(str, names)) or "none"
    raise EngineError(f"config.json: architecture {asked!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
