"""The decoder's arithmetic against transformers', dense attention on both sides: families, biases, rope types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.loader import LoadedModel, load_model
from engine.models.random_model import write_random_model

# Its optional import `kernels` finds our folder, whose __version__ is too low for it, so it does without.
transformers = pytest.importorskip("transformers", reason="transformers is the oracle; install the dev extra")

BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
SLIDING = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biases-wide-heads-tied": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 32, "tie_word_embeddings": True},
    ),
    "llama-multi-head": ("llama", {"num_key_value_heads": 4, "rope_theta": 500000.0}),
    "rope-linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 5000.0}),
    "rope-llama3": ("llama", {"rope_scaling": LLAMA3, "rope_theta": 500000.0}),
    "rope-yarn": ("llama", {"rope_scaling": YARN}),
    "rope-yarn-options": (
        "qwen3",
        {"rope_scaling": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}, "head_dim": 16},
    ),
    "rope-yarn-attention-factor": ("qwen2", {"rope_scaling": {**YARN, "attention_factor": 1.25}}),
    "rope-yarn-mscale": ("llama", {"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}}),
    "qwen2": ("qwen2", {}),
    "qwen2-two-groups": ("qwen2", {**SLIDING, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-two-groups-biases": ("qwen3", {**SLIDING, "head_dim": 24, "attention_bias": True}),
    "mistral": ("mistral", {"sliding_window": 8, "head_dim": 16}),
    "mistral-full": ("mistral", {"sliding_window": None}),
}
ARCHITECTURES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral"}


def dense(loaded: LoadedModel, ids: Tensor) -> Tensor:
    config, steps = loaded.config, torch.arange(len(ids))
    distance = steps[:, None] - steps[None]

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        group = config.num_heads // config.num_kv_heads
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        hidden = (distance < 0) | (distance >= (config.windows[layer] or len(ids)))
        scores = torch.einsum("qhd,khd->hqk", query, key) * config.head_dim**-0.5
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value).contiguous()

    with torch.inference_mode():
        return loaded.model.logits(loaded.model.hidden(ids, steps, len(ids), attend))


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    family, changes = CASES[name]
    raw = {**BASE, "architectures": [f"{ARCHITECTURES[family]}ForCausalLM"], "model_type": family, **changes}
    folder = write_random_model(tmp_path / name, raw, seed=1, deviation=0.15)
    loaded = load_model(folder, dtype="float32")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    ids = torch.randint(0, raw["vocab_size"], (300,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = oracle(ids[None]).logits[0]
    assert len({window for window in loaded.config.windows if window}) == len(
        {group.window for group in loaded.groups if group.window}
    )
    deviation = float(expected.std())
    assert deviation > 0.3  # logits that tell tokens apart, so that agreement means something
    difference = (dense(loaded, ids) - expected).abs().max() / deviation
    assert float(difference) < 2e-5


def test_a_folder_that_transformers_saved_loads(tmp_path: Path) -> None:
    config = transformers.Qwen2Config(**BASE, **SLIDING, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    torch.manual_seed(0)
    oracle = transformers.Qwen2ForCausalLM(config).eval()
    oracle.save_pretrained(tmp_path, max_shard_size="100KB")
    loaded = load_model(tmp_path, dtype="float32")
    assert [group.layers for group in loaded.groups] == [(0,), (1, 2)]
    ids = torch.arange(40)
    with torch.inference_mode():
        expected = oracle(ids[None]).logits[0]
    assert float((dense(loaded, ids) - expected).abs().max()) < 1e-5
