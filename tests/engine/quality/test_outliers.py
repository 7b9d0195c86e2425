"""The twin has outliers in its keys and the same function."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.clock import RealClock
from engine.loader import load_model
from engine.models.random_model import write_random_model
from engine.quality.compare import compare
from engine.quality.outliers import outlier_twin
from engine.quality.samples import Sample
from engine.quality.scoring import Conditions, ScoringEngine

BASE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])  # plain, with biases, with norms after the projection
def test_the_function_stays_and_the_keys_do_not(family: str, tmp_path: Path) -> None:
    config = {**BASE, "architectures": [f"{family}ForCausalLM"], "head_dim": 8 if family == "Qwen2" else 16}
    folder = write_random_model(tmp_path / "m", config, seed=2, deviation=0.3)
    loaded = load_model(folder, dtype="float32")
    twin = outlier_twin(loaded, seed=3)
    rng = random.Random(0)
    sample = Sample(tuple(rng.randrange(64) for _ in range(200)), prompt=200, score_from=1)

    def logprobs(model: Any) -> torch.Tensor:
        scoring = ScoringEngine(model, [sample], {}, Conditions(chunk_tokens=256, batch=1), RealClock())
        found = scoring.step()
        assert found is not None
        return found.logprobs

    plain, outlying = logprobs(loaded), logprobs(twin)
    assert (plain - outlying).abs().max() < 1e-4
    assert plain.argmax(-1).equal(outlying.argmax(-1))
    layer, other = loaded.model.weights.layers[0], twin.model.weights.layers[0]
    heads = config["num_attention_heads"]
    if layer.qk_norm is not None and other.qk_norm is not None:
        ratio = (other.qk_norm / layer.qk_norm)[heads:]
        assert torch.equal(other.qkv, layer.qkv)
    else:
        dim = config["head_dim"]
        ratio = (other.qkv / layer.qkv)[heads * dim : (heads + 2) * dim].mean(-1).view(2, dim)
    half = ratio.shape[1] // 2
    assert torch.allclose(ratio[:, :half], ratio[:, half:], rtol=1e-3)
    assert 1 <= ratio.min() < 5
    assert 20 < ratio.max() <= 50.01
    # The weights of the model itself are as they were.
    assert (logprobs(loaded) - plain).abs().max() == 0


def test_formats_with_scales_per_channel_do_not_mind(tmp_path: Path) -> None:
    config = {**BASE, "architectures": ["LlamaForCausalLM"], "head_dim": 16}
    loaded = load_model(write_random_model(tmp_path / "m", config, seed=2, deviation=0.3), dtype="float32")
    rng = random.Random(0)
    samples = [Sample(tuple(rng.randrange(64) for _ in range(300)), prompt=300, score_from=150) for _ in range(2)]
    kl = [
        compare(model, {"int4": {"kv_format": "int4"}}, samples)["int4"].tally.figures()
        for model in (loaded, outlier_twin(loaded))
    ]
    assert kl[0] is not None
    assert kl[1] is not None
    assert kl[1].kl == pytest.approx(kl[0].kl, rel=0.2)
