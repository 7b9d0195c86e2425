"""Every reader of a model's folder: configuration, weights, tokenizer, chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from reader import JSON, Reader, file_with, safetensors_head, verb

from engine.bundled.tokenizer import save_tokenizer, train_tokenizer
from engine.errors import EngineError
from engine.loader import load_model
from engine.models.folder import check_folder
from engine.models.random_model import write_random_model
from engine.token_bytes import detokenizer_factory
from engine.tokenizer import ChatTemplateError, ModelTokenizer

MODEL_CONFIG: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "sliding_window": None, "eos_token_id": [1, 2],
}  # fmt: skip
_TEXT: Final = "It is a truth universally acknowledged, that 42 men must be in want of 7 wives.\n" * 3


def _model(folder: Path, name: str) -> Path:
    write_random_model(folder, MODEL_CONFIG, seed=4)
    save_tokenizer(train_tokenizer([_TEXT], 300), folder, 4096)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    return folder / name


def _plan(path: Path) -> None:
    """What a model needs, by its configuration alone; and whether an engine would begin to load it."""
    verb("plan", str(path), "--json")
    verb("plan", str(path), "--gpu", "24G", "--sessions", "4")
    check_folder(path.parent)


def _load(path: Path) -> None:
    load_model(path.parent)


def _sharded(folder: Path) -> Path:
    _model(folder, "config.json")
    weights = folder / "model.safetensors"
    weights.rename(folder / "model-00001-of-00001.safetensors")
    names = {"model.embed_tokens.weight": "model-00001-of-00001.safetensors"}
    return file_with("model.safetensors.index.json", json.dumps({"metadata": {}, "weight_map": names}))(folder)


def _tokenizer(path: Path) -> None:
    tokenizer = ModelTokenizer(path.parent)
    ids = tokenizer.encode(_TEXT)
    detokenizer_factory(path.parent, tokenizer.decode)([])
    tokenizer.decode(ids)
    if tokenizer.has_chat_template:
        tokenizer.encode_chat([{"role": "user", "content": "Hello"}])


def _template(folder: Path) -> Path:
    _model(folder, "config.json")
    source = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    return file_with("chat_template.jinja", source)(folder)


READERS: Final = (
    Reader("model configuration", lambda to: _model(to, "config.json"), _plan, (EngineError,), JSON),
    Reader("model configuration, loading", lambda to: _model(to, "config.json"), _load, (EngineError,), JSON),
    Reader("model weights", lambda to: _model(to, "model.safetensors"), _load, (EngineError,), head=safetensors_head),
    Reader("model weights' index", _sharded, _load, (EngineError,), JSON),
    Reader("generation configuration", lambda to: _model(to, "generation_config.json"), _load, (EngineError,), JSON),
    Reader("tokenizer", lambda to: _model(to, "tokenizer.json"), _tokenizer, (EngineError, ChatTemplateError), JSON),
    Reader("tokenizer configuration", lambda to: _model(to, "tokenizer_config.json"), _tokenizer,
           (EngineError, ChatTemplateError), JSON),
    Reader("chat template", _template, _tokenizer, (EngineError, ChatTemplateError)),
)  # fmt: skip
