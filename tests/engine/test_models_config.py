"""config.json in, decoder configuration out: families, defaults, rope types, and one-line refusals."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import EngineError
from engine.models.registry import ARCHITECTURES, parse_config

BASE = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def raw(family: str, **changes: Any) -> dict[str, Any]:
    data = {**BASE, "architectures": [f"{family}ForCausalLM"], **changes}
    return {name: value for name, value in data.items() if value != "absent"}


def test_llama_defaults_follow_hugging_face() -> None:
    config = parse_config(raw("Llama", num_key_value_heads="absent"))
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps, config.rope.theta) == (4, 16, 1e-6, 10000.0)
    assert [config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm] == [False] * 4
    assert not config.tie_word_embeddings
    assert config.windows == (None,) * 4


def test_each_family_has_its_own_shape() -> None:
    qwen2 = parse_config(raw("Qwen2"))
    assert qwen2.qkv_bias
    assert not qwen2.output_bias
    qwen3 = parse_config(raw("Qwen3"))
    assert (qwen3.head_dim, qwen3.qk_norm, qwen3.qkv_bias) == (128, True, False)
    llama = parse_config(raw("Llama", attention_bias=True, mlp_bias=True))
    assert (llama.qkv_bias, llama.output_bias, llama.mlp_bias) == (True, True, True)
    assert parse_config(raw("Mistral", num_key_value_heads="absent", num_attention_heads=8)).num_kv_heads == 8


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, (4096,) * 4),
        ({"sliding_window": None}, (None,) * 4),
        ({"sliding_window": 8}, (8,) * 4),
    ],
)
def test_mistral_windows(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert parse_config(raw("Mistral", **changes)).windows == windows


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
def test_qwen_windows(family: str) -> None:
    assert parse_config(raw(family, sliding_window=8, max_window_layers=1)).windows == (None,) * 4  # not switched on
    sliding = {"use_sliding_window": True, "sliding_window": 8}
    assert parse_config(raw(family, **sliding, max_window_layers=3)).windows == (None, None, None, 8)
    kinds = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    assert parse_config(raw(family, **sliding, layer_types=kinds)).windows == (8, None, None, 8)
    with pytest.raises(EngineError, match="2 layer_types for 4 layers"):
        parse_config(raw(family, **sliding, layer_types=kinds[:2]))
    with pytest.raises(EngineError, match="chunked_attention"):
        parse_config(raw(family, layer_types=["chunked_attention"] * 4))
    with pytest.raises(EngineError, match="layer type"):
        parse_config(raw(family, layer_types=[["full_attention"]] * 4))


def test_rope_reads_old_and_new_spelling() -> None:
    old = parse_config(raw("Llama", rope_theta=5e5, rope_scaling={"type": "linear", "factor": 4.0}))
    new = parse_config(
        raw("Llama", rope_parameters={"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}),
    )
    assert old.rope == new.rope
    assert (old.rope.theta, old.rope.factor) == (5e5, 4.0)


def test_yarn_extends_the_context() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert parse_config(raw("Qwen2", rope_scaling=yarn)).max_model_len == 2048
    already = parse_config(raw("Qwen2", rope_scaling=yarn, max_position_embeddings=2048))
    assert already.max_model_len == 2048


def test_architecture_from_model_type_when_the_list_is_absent() -> None:
    config = parse_config(raw("Qwen3", architectures="absent", model_type="qwen3"))
    assert config.architecture == "Qwen3ForCausalLM"


LENGTH = "original_max_position_embeddings"
ODD_NUMBERS = [float("nan"), float("inf"), -1, True, [1], 10**400]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": "absent", "model_type": "gemma"}, "gemma"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported; supported: default"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"type": "linear"}}, "needs 'factor'"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "positive number"),
        ({"rope_scaling": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "awq"}}, "unquantised"),
        ({"hidden_size": "absent"}, "hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"head_dim": 12}, "multiple of 8"),
        ({"hidden_size": 66}, "no multiple"),
        ({"tie_word_embeddings": "yes"}, "true or false"),
        ({"rms_norm_eps": "small"}, "must be a positive number"),
        *(({"rms_norm_eps": odd}, "rms_norm_eps must be a positive number") for odd in ODD_NUMBERS),
        *(({"rope_theta": odd}, "rope_theta must be") for odd in ODD_NUMBERS),
        *(({"rope_scaling": {"type": "linear", "factor": odd}}, "factor must be") for odd in ODD_NUMBERS),
        *(({"rope_scaling": {"type": "yarn", LENGTH: odd}}, f"{LENGTH} must be") for odd in ODD_NUMBERS),
        ({"rope_scaling": {"type": "yarn"}, LENGTH: "long"}, f"{LENGTH} must be"),
        ({"rope_scaling": {"type": "yarn", "factor": 1e308}}, "beyond any context"),
        ({"rope_theta": 1}, "rope_theta must be above 1"),
        ({"partial_rotary_factor": [1]}, "partial_rotary_factor"),
        ({"hidden_act": ["silu"]}, "activation"),
        ({"architectures": [["LlamaForCausalLM"]]}, "is not supported; supported"),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers must be a whole number from 1 to 10000, got 10000000"),
        ({"max_position_embeddings": 10**400}, "max_position_embeddings must be a whole number"),
        ({"eos_token_id": ["x"]}, "eos_token_id"),
    ],
)
def test_what_is_not_supported_is_one_line_that_names_it(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message) as caught:
        parse_config(raw("Llama", **changes))
    assert "\n" not in str(caught.value)


def test_the_refusal_lists_the_supported_architectures() -> None:
    with pytest.raises(EngineError) as caught:
        parse_config(raw("Llama", architectures=["MambaForCausalLM"]))
    assert all(name in str(caught.value) for name in ARCHITECTURES)
    assert set(ARCHITECTURES) == {f"{name}ForCausalLM" for name in ("Llama", "Qwen2", "Qwen3", "Mistral")}
