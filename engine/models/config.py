"""What a decoder needs to know about a model, read from a Hugging Face ``config.json``. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import EngineError
from engine.models.positive import positive
from engine.models.rope_config import RopeConfig, parse_rope

_MOST_SIZE = (1 << 63) - 1  # no tensor has a larger one
_MOST_LAYERS = 10_000  # weights are set out layer by layer before the file can show that there are fewer


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only transformer with rotary positions, RMS norms and a gated SiLU feed-forward.

    ``windows``: per layer, the attention window in tokens counting the current one, or None for full attention.
    ``qkv_bias``/``output_bias``/``mlp_bias``: which projections carry a bias. ``qk_norm``: RMS norm over each query and
    key head before rotation. ``max_model_len``: positions the model was made for. ``dtype``: the name the file asks for
    (``bfloat16``, …) or None.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_model_len: int
    rope: RopeConfig
    windows: tuple[int | None, ...]
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    dtype: str | None = None
    bos_token_id: int | None = None
    eos_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise EngineError(
                f"config.json: num_attention_heads {self.num_heads} is not a multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )
        if self.head_dim % 8:
            raise EngineError(f"config.json: head_dim must be a multiple of 8, got {self.head_dim}")
        if len(self.windows) != self.num_layers:
            raise EngineError(f"config.json: {len(self.windows)} layer_types for {self.num_layers} layers")

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


class ConfigReader:
    """Typed look-ups in a raw ``config.json``; every bad or missing key is an EngineError that names it."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw

    def integer(self, name: str, default: int | None = None, minimum: int = 1) -> int:
        value = self.raw.get(name)
        most = _MOST_LAYERS if name == "num_hidden_layers" else _MOST_SIZE
        if value is None:
            if default is None:
                raise EngineError(f"config.json lacks {name!r}; is this the folder of a Hugging Face language model?")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= most:
            limits = f">= {minimum}" if most == _MOST_SIZE else f"from {minimum} to {most}"
            raise EngineError(f"config.json: {name} must be a whole number {limits}, got {value!r:.60}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.raw.get(name)
        return default if value is None else positive(name, value)

    def flag(self, name: str, *, default: bool = False) -> bool:
        value = self.raw.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise EngineError(f"config.json: {name} must be true or false, got {value!r}")
        return value

    def token_ids(self, name: str) -> frozenset[int]:
        """A token id, a list of them, or nothing."""
        value = self.raw.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(token, int) for token in ids):
            raise EngineError(f"config.json: {name} must be a token id or a list of them, got {value!r}")
        return frozenset(ids)

    def layer_windows(self, num_layers: int, window: int | None, first_windowed: int) -> tuple[int | None, ...]:
        """Window per layer: from ``layer_types`` where given, else for layers from ``first_windowed`` on."""
        kinds = self.raw.get("layer_types")
        if not isinstance(kinds, list):
            return tuple(window if layer >= first_windowed else None for layer in range(num_layers))
        unknown = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
        if unknown:
            raise EngineError(
                f"config.json: layer type {str(unknown[0])!r:.60} is not supported; "
                "supported: full_attention, sliding_attention"
            )
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def parse_common(
    raw: Mapping[str, Any],
    *,
    architecture: str,
    default_kv_heads: int | None,
    default_head_dim: int | None,
    windows: tuple[int | None, ...],
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> ModelConfig:
    """The keys that all families share; what differs is given by the family's own file.

    Defaults of absent keys are those of the Hugging Face configuration classes, since files are written against them.
    ``default_kv_heads``/``default_head_dim``: None means as many as heads, and hidden_size / heads.
    """
    read = ConfigReader(raw)
    _refuse_unsupported(raw)
    num_heads = read.integer("num_attention_heads")
    hidden_size = read.integer("hidden_size")
    if raw.get("head_dim") is None and default_head_dim is None and hidden_size % num_heads:
        raise EngineError(f"config.json: hidden_size {hidden_size} is no multiple of num_attention_heads {num_heads}")
    max_positions = read.integer("max_position_embeddings")
    rope = parse_rope(raw, max_positions)
    dtype = raw.get("dtype", raw.get("torch_dtype"))
    bos = read.token_ids("bos_token_id")
    return ModelConfig(
        architecture=architecture,
        vocab_size=read.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=read.integer("intermediate_size"),
        num_layers=read.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=read.integer("num_key_value_heads", default_kv_heads or num_heads),
        head_dim=read.integer("head_dim", default_head_dim or hidden_size // num_heads),
        rms_norm_eps=read.number("rms_norm_eps", 1e-6),
        max_model_len=max(max_positions, rope.extended_positions),
        rope=rope,
        windows=windows,
        tie_word_embeddings=read.flag("tie_word_embeddings"),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        dtype=str(dtype).removeprefix("torch.") if dtype is not None else None,
        bos_token_id=min(bos) if bos else None,
        eos_token_ids=read.token_ids("eos_token_id"),
    )


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):  # a list is no member of a set
        raise EngineError(f"config.json: activation {activation!r:.60} is not supported; supported: silu")
    if raw.get("quantization_config") is not None:
        raise EngineError(
            "this model's weights are quantised; use its unquantised checkpoint (float32, bfloat16 or float16): "
            "kv-autotune quantises the KV cache, not the weights"
        )
