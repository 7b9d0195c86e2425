"""Which rotary position embedding a model uses. No torch; the frequencies are computed in ``rope.py``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import EngineError

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


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
    if partial not in {None, 1}:
        raise EngineError(f"config.json: partial_rotary_factor {partial!r} is not supported; supported: 1.0")

    def number(name: str, default: float | None) -> float:
        value = parameters.get(name)
        if value is None:
            if default is None:
                raise EngineError(f"config.json: rope type {rope_type!r} needs {name!r}")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise EngineError(f"config.json: rope parameter {name} must be a positive number, got {value!r}")
        return float(value)

    def optional(name: str) -> float | None:
        return number(name, None) if parameters.get(name) is not None else None

    theta = number("rope_theta", float(raw.get("rope_theta") or 10000.0))
    if rope_type == "default":
        return RopeConfig(theta=theta)
    # transformers lets a length outside the rope parameters win, and falls back to the model's own maximum.
    outside = raw.get("original_max_position_embeddings")
    original = int(outside) if outside else int(number("original_max_position_embeddings", float(max_positions)))
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
    return RopeConfig(
        theta=theta,
        rope_type=rope_type,
        factor=number("factor", max_positions / original),
        original_positions=original,
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        attention_factor=optional("attention_factor"),
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
        truncate=bool(parameters.get("truncate", True)),
    )
