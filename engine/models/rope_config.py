"""Which rotary position embedding a model uses. No torch; the frequencies are computed in ``rope.py``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import EngineError
from engine.models.positive import positive

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_BEYOND = 1 << 63  # no tensor has so many rows


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of base ``theta`` and its scaling, named as in Hugging Face files.

    ``original_positions``: context length before scaling (llama3, yarn). Fields of other types are ignored.
    """

    theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @property
    def extended_positions(self) -> int:
        """Context that YaRN stretches the original one to; 0 for other types, whose files give the final length."""
        return round(self.original_positions * self.factor) if self.rope_type == "yarn" else 0


def parse_rope(raw: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """Read ``rope_parameters`` (transformers 5) or ``rope_theta`` + ``rope_scaling`` (before).

    Raises EngineError for a type that is not offered, or for missing or ill-typed parameters.
    """
    parameters = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping):
        raise EngineError(f"config.json: rope parameters must be an object, got {parameters!r}")
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise EngineError("config.json: rope parameters that differ per layer type are not supported")
    rope_type = parameters.get("rope_type", parameters.get("type")) or "default"
    if rope_type not in ROPE_TYPES:
        raise EngineError(f"config.json: rope type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    partial = parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial is not None and partial != 1:
        raise EngineError(f"config.json: partial_rotary_factor {partial!r:.60} is not supported; supported: 1.0")

    def number(name: str, default: float | None) -> float:
        value = parameters.get(name)
        if value is None:
            if default is None:
                raise EngineError(f"config.json: rope type {rope_type!r} needs {name!r}")
            return default
        return positive(f"rope parameter {name}", value)

    def optional(name: str) -> float | None:
        return number(name, None) if parameters.get(name) is not None else None

    theta = number("rope_theta", positive("rope_theta", raw.get("rope_theta") or 10000.0))
    if theta <= 1:  # at 1 all wavelengths are equal, below it they shrink
        raise EngineError(f"config.json: rope_theta must be above 1, got {theta:g}")
    if rope_type == "default":
        return RopeConfig(theta=theta)
    # transformers lets a length outside the rope parameters win, and falls back to the model's own maximum.
    outside = raw.get("original_max_position_embeddings")
    length = "original_max_position_embeddings"
    original = max(1, int(positive(length, outside) if outside else number(length, float(max_positions))))
    if rope_type == "linear":
        return RopeConfig(theta=theta, rope_type=rope_type, factor=number("factor", None))
    if rope_type == "llama3":
        return RopeConfig(
            theta=theta,
            rope_type=rope_type,
            factor=number("factor", None),
            original_positions=original,
            low_freq_factor=number("low_freq_factor", None),
            high_freq_factor=number("high_freq_factor", None),
        )
    factor = number("factor", max_positions / original)
    if original * factor >= _BEYOND:
        raise EngineError(f"config.json: rope factor {factor:g} over {original} positions is beyond any context")
    return RopeConfig(
        theta=theta,
        rope_type=rope_type,
        factor=factor,
        original_positions=original,
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        attention_factor=optional("attention_factor"),
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
        truncate=bool(parameters.get("truncate", True)),
    )
