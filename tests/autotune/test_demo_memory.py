"""KV bytes of a model folder: by the dtype that the engine would run it in, and by the engine's own layer groups."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autotune.demo.load import kv_memory
from engine.errors import EngineError

# 6 layers x 2 heads x (keys and values) of 64 elements.
ELEMENTS = 6 * 2 * 2 * 64
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
WINDOWED = {
    **LLAMA,
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "use_sliding_window": True,
    "sliding_window": 128,
}


def folder(place: Path, **changes: Any) -> Path:
    (place / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return place


@pytest.mark.parametrize(
    ("asked", "of_file", "element_bytes"),
    [
        ("bfloat16", "float32", 2),
        ("auto", "float32", 4),
        ("auto", "bfloat16", 2),
        ("auto", "torch.float32", 4),
        ("auto", None, 2),
        ("float32", "bfloat16", 4),
        ("float16", "float32", 2),
    ],
)
def test_the_dtype_is_the_one_that_the_engine_takes(
    tmp_path: Path, asked: str, of_file: str | None, element_bytes: int
) -> None:
    memory = kv_memory(folder(tmp_path, torch_dtype=of_file), asked)
    assert memory.native_token_bytes == ELEMENTS * element_bytes
    # int4: half a byte each, and per tile of 32 tokens two constants per channel (keys) and per token (values).
    constants = 6 * 2 * 2 * (64 + 32) / 32 * element_bytes
    assert memory.small_token_bytes == ELEMENTS / 2 + constants
    assert memory.max_model_len == 4096


def test_groups_of_windows_are_counted_like_the_others(tmp_path: Path) -> None:
    memory = kv_memory(folder(tmp_path, **WINDOWED, torch_dtype="bfloat16"), "auto")
    assert memory.native_token_bytes == ELEMENTS * 2


@pytest.mark.parametrize(
    ("dtype", "name"), [("auto", "float32"), ("bfloat16", "float32"), ("auto", "bfloat16"), ("float32", None)]
)
def test_it_is_what_a_loaded_model_takes(tmp_path: Path, dtype: str, name: str | None) -> None:
    pytest.importorskip("torch")
    from engine.loader import load_model
    from engine.memory_model import bytes_by_format
    from engine.models.random_model import write_random_model

    place = tmp_path / "model"
    write_random_model(place, {**WINDOWED}, seed=0)
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, "torch_dtype": name}))
    loaded = load_model(place, "cpu", dtype)
    assert len(loaded.groups) == 2
    sizes = bytes_by_format(loaded.groups)
    memory = kv_memory(place, dtype)
    assert (memory.native_token_bytes, memory.small_token_bytes) == (sizes["native"], min(sizes.values()))
    assert memory.native_token_bytes == ELEMENTS * loaded.model.dtype.itemsize


def test_what_the_engine_would_refuse_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="not supported"):
        kv_memory(folder(tmp_path, architectures=["OtherForCausalLM"]), "auto")
    with pytest.raises(EngineError, match="'int8' is not offered"):
        kv_memory(folder(tmp_path, torch_dtype="int8"), "auto")
