"""Models to measure, of random weights: the one that all peers run, and one whose steps are bound by KV."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.bundled.tokenizer import save_tokenizer, train_tokenizer
from engine.models.random_model import write_random_model

_COMMON: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
# 8.4 M parameters. What all engines are compared on.
REFERENCE: dict[str, Any] = {
    **_COMMON,
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
# 8 kB of KV per token beside 4 MB of weights: at 16 sequences of 1,024 tokens a step reads 30 times as much KV.
KV_BOUND: dict[str, Any] = {
    **_COMMON,
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}
# Blocks of 2 kB and hardly any arithmetic: bookkeeping and tables stand out, and 100,000 blocks fit anywhere.
TINY_KV: dict[str, Any] = {
    **_COMMON,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 1 << 18,
}


def make_model(folder: Path, raw: dict[str, Any], *, dtype: str = "bfloat16") -> Path:
    """A model folder with weights and a tokenizer that decodes every id; made once per folder."""
    if not (folder / "tokenizer.json").is_file():
        write_random_model(folder, raw, seed=0, dtype=dtype)
        tokenizer = train_tokenizer(_sources(), raw["vocab_size"])
        save_tokenizer(tokenizer, folder, raw["max_position_embeddings"])
    return folder


def weight_bytes(raw: dict[str, Any], element_bytes: int = 2) -> int:
    """Bytes of the matrices that every step reads (the embedding's rows are not)."""
    hidden, head_dim = raw["hidden_size"], raw["head_dim"]
    heads, kv_heads = raw["num_attention_heads"], raw["num_key_value_heads"]
    layer = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * raw["intermediate_size"]
    return int(element_bytes * (raw["num_hidden_layers"] * layer + hidden * raw["vocab_size"]))


def _sources() -> Iterator[str]:
    """Text that every Python brings."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:150]:
        yield path.read_text(encoding="utf-8", errors="replace")
