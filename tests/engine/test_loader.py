"""Model folders, whole and broken: every fault is one line that says what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import EngineError
from engine.loader import load_model
from engine.models.random_model import write_random_model

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_random_model(tmp_path / "model", CONFIG, seed=0)


def error_of(folder: Path, **options: str) -> str:
    with pytest.raises(EngineError) as caught:
        load_model(folder, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def rewrite(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in change.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")


def test_fused_matrices_hold_the_named_ones(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    loaded = load_model(folder, dtype="float32")
    layer = loaded.model.weights.layers[1]
    names = [f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv"]
    assert torch.equal(layer.qkv, torch.cat([tensors[name] for name in names]))
    names = [f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up")]
    assert torch.equal(layer.gate_up, torch.cat([tensors[name] for name in names]))
    assert torch.equal(loaded.model.weights.head, tensors["lm_head.weight"])
    assert loaded.name == "model"
    assert loaded.eos_token_ids == {2}


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_dtypes(folder: Path, name: str) -> None:
    loaded = load_model(folder, dtype=name)
    assert loaded.model.dtype == getattr(torch, name)
    assert loaded.groups[0].shape.element_bytes == loaded.model.dtype.itemsize


def test_auto_dtype_is_what_the_file_says(folder: Path) -> None:
    assert load_model(folder).model.dtype == torch.float32
    text = json.dumps({**CONFIG, "dtype": "bfloat16"})
    (folder / "config.json").write_text(text)
    assert load_model(folder).model.dtype == torch.bfloat16
    assert "float64" in error_of(folder, dtype="float64")


def test_sharded_weights_are_the_same_model(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    (sharded / "config.json").write_text((folder / "config.json").read_text())
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in parts.items():
        save_file({name: tensors[name] for name in members}, sharded / file)
    weight_map = {name: file for file, members in parts.items() for name in members}
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    whole, split = load_model(folder), load_model(sharded)
    assert torch.equal(whole.model.weights.layers[0].qkv, split.model.weights.layers[0].qkv)
    for outside in ("../model.safetensors", "/etc/passwd", "a/b.safetensors", "x" * 300):
        (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": outside}}))
        assert "which is no file beside it" in error_of(sharded)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (sharded / "b.safetensors").unlink()
    assert "lacks 1 of 2 weight files, first b.safetensors" in error_of(sharded)


def test_tied_embeddings_share_memory_and_ignore_a_stored_head(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path / "tied", {**CONFIG, "tie_word_embeddings": True}, seed=0)
    rewrite(
        folder, {"lm_head.weight": torch.zeros(40, 32), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    )
    weights = load_model(folder).model.weights
    assert weights.head is weights.embedding


def test_layers_group_by_window(tmp_path: Path) -> None:
    config = {
        **CONFIG,
        "architectures": ["Qwen2ForCausalLM"],
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 2,
    }
    groups = load_model(write_random_model(tmp_path / "qwen", config, seed=0)).groups
    assert [(group.name, group.layers, group.window) for group in groups] == [
        ("full", (0, 1), None),
        ("window16", (2,), 16),
    ]
    assert [group.shape.num_layers for group in groups] == [2, 1]


def test_a_window_longer_than_any_context_is_full_attention(tmp_path: Path) -> None:
    config = {**CONFIG, "architectures": ["MistralForCausalLM"], "sliding_window": 64}
    groups = load_model(write_random_model(tmp_path / "mistral", config, seed=0)).groups
    assert [group.window for group in groups] == [None]


def test_generation_config_adds_end_tokens(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert load_model(folder).eos_token_ids == {2, 7}


def test_missing_folder_and_files(folder: Path, tmp_path: Path) -> None:
    assert "does not exist" in error_of(tmp_path / "nowhere")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "convert them to safetensors" in error_of(folder)
    (folder / "pytorch_model.bin").unlink()
    assert "download the weights" in error_of(folder)
    (folder / "config.json").write_text("{")
    assert "cannot be read as JSON" in error_of(folder)
    (folder / "config.json").write_text("[]")
    assert "JSON object" in error_of(folder)
    (folder / "config.json").unlink()
    assert "holds no config.json" in error_of(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_safetensors(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert "truncated or not a safetensors file" in error_of(folder)


def test_missing_extra_and_misshaped_tensors(folder: Path) -> None:
    original = (folder / "model.safetensors").read_bytes()
    rewrite(folder, {"model.layers.1.mlp.up_proj.weight": None})
    assert "1 of 21 tensors are missing from the weights, first model.layers.1.mlp.up_proj.weight" in error_of(folder)
    (folder / "model.safetensors").write_bytes(original)
    rewrite(folder, {"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)})
    assert "not part of the architecture, first model.layers.0.self_attn.q_proj.bias" in error_of(folder)
    (folder / "model.safetensors").write_bytes(original)
    rewrite(folder, {"model.norm.weight": torch.zeros(31)})
    assert "model.norm.weight has shape [31], config.json asks for [32]" in error_of(folder)


def test_devices(folder: Path) -> None:
    assert "not known to torch" in error_of(folder, device="gpu9")
    assert "use cpu or cuda" in error_of(folder, device="meta")
    assert "not available" in error_of(folder, device="cuda:77")
