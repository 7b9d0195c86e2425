"""Case E.15: a model's own window while the total length reaches it, through the whole engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.loader import LoadedModel, load_model
from engine.models.random_model import write_random_model
from engine.offline import OfflineEngine
from engine.request import SamplingParams

WINDOW = 8
CONFIG: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "sliding_window": WINDOW,
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = tmp_path_factory.mktemp("cases") / "model"
    return load_model(write_random_model(folder, CONFIG, seed=9, deviation=0.25), dtype="float32")


def dense_logprobs(loaded: LoadedModel, ids: list[int]) -> Tensor:
    """With a band mask: position t attends t - WINDOW + 1 .. t, the meaning of W that counts the current token."""
    distance = torch.arange(len(ids))[:, None] - torch.arange(len(ids))[None, :]
    seen = (distance >= 0) & (distance < WINDOW)

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # noqa: ARG001 - all are alike
        out = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key.repeat_interleave(2, 1).transpose(0, 1)[None],
            value.repeat_interleave(2, 1).transpose(0, 1)[None],
            attn_mask=seen,
        )
        return out[0].transpose(0, 1).contiguous()

    with torch.inference_mode():
        hidden = loaded.model.hidden(torch.tensor(ids), torch.arange(len(ids)), len(ids), attend)
        return torch.log_softmax(loaded.model.logits(hidden), -1)


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("length", [1, WINDOW - 2, WINDOW - 1, WINDOW, WINDOW + 1, 15, 16, 17, 40])
def test_logits_while_the_length_reaches_the_window(loaded: LoadedModel, length: int, block_size: int) -> None:
    """huggingface/transformers#37574: W = 8, prompts of 6, 7, 8, 9 and others, then one token after the other."""
    engine = OfflineEngine(loaded, pool_bytes=8 << 20, values={"block_size": block_size})
    result = engine.add([(7 * i + length) % 64 for i in range(length)], SamplingParams(max_tokens=20, logprobs=0))

    def look(_plan: object) -> None:
        if engine.cache.holds(result.request):  # every position that the next token attends is stored
            entries = engine.cache.entries(result.request, 0)
            stored = {entry.first + i for entry in entries for i in range(entry.valid)}
            computed = result.request.num_computed_tokens
            assert set(range(max(0, computed - WINDOW + 1), computed)) <= stored

    engine.run(look)
    ids = result.request.all_ids
    expected = dense_logprobs(loaded, ids)
    found = [entry.logprob for entry in result.logprobs]
    assert found == pytest.approx(
        [float(expected[length - 1 + i, token]) for i, token in enumerate(result.output_ids)], abs=2e-4
    )
    assert len(found) == 20
