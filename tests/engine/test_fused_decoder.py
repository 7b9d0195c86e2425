"""The fused decoder against the plain one, and its whole step against itself layer by layer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.loader import LoadedModel, load_model
from engine.models.fused_decoder import FusedDecoder
from engine.models.random_model import write_random_model
from engine.offline import OfflineEngine
from engine.request import SamplingParams

BASE: dict[str, Any] = {
    "vocab_size": 130,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": None,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "llama-biased": {"architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True},
    "qwen2-tied": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "qwen3-normed": {"architectures": ["Qwen3ForCausalLM"]},
    "mistral-window": {"architectures": ["MistralForCausalLM"], "sliding_window": 24},
}


def both(folder: Path, name: str, dtype: str) -> tuple[LoadedModel, LoadedModel]:
    """Fused and plain."""
    write_random_model(folder, {**BASE, **MODELS[name]}, seed=3, deviation=0.15)
    fused = load_model(folder, dtype=dtype)
    if not isinstance(fused.model, FusedDecoder):
        pytest.skip("this processor does not suit the fused decoder")
    return fused, load_model(folder, dtype=dtype, fuse=False)


def values_of(_layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Something that depends on all three in place of attention."""
    group = query.shape[1] // key.shape[1]
    weight = (query * key.repeat_interleave(group, 1)).sum(-1, keepdim=True).sigmoid()
    return (weight * value.repeat_interleave(group, 1)).contiguous()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-4), ("bfloat16", 0.1)])
def test_hidden_states_and_logits_are_the_plain_decoders(
    tmp_path: Path, name: str, dtype: str, tolerance: float
) -> None:
    fused, plain = both(tmp_path, name, dtype)
    ids = torch.randint(0, 130, (53,), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(40, 93)
    with torch.inference_mode():
        found = fused.model.logits(fused.model.hidden(ids, positions, 93, values_of))
        expected = plain.model.logits(plain.model.hidden(ids, positions, 93, values_of))
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * float(expected.std()))


def outputs(loaded: LoadedModel, *, whole_steps: bool) -> list[list[int]]:
    """Greedy outputs of prompts of several lengths, decoded together."""
    engine = OfflineEngine(loaded, pool_bytes=8 << 20)
    if not whole_steps:
        engine.runner._model = _Layered(engine.runner._model)  # type: ignore[assignment]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    results = [engine.add([(7 * i + j) % 130 for j in range(9 + 5 * i)], params) for i in range(5)]
    engine.run()
    return [result.output_ids for result in results]


class _Layered:
    """A fused decoder that the runner does not know for one, so that it goes layer by layer."""

    def __init__(self, model: Any) -> None:
        self.hidden, self.logits, self.dtype, self.device = model.hidden, model.logits, model.dtype, model.device


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_whole_steps_choose_what_layers_one_by_one_choose(tmp_path: Path, name: str, dtype: str) -> None:
    fused, _ = both(tmp_path, name, dtype)
    assert outputs(fused, whole_steps=True) == outputs(fused, whole_steps=False)


def test_decode_steps_are_one_call(tmp_path: Path) -> None:
    fused, _ = both(tmp_path, "llama", "float32")
    model = fused.model
    assert isinstance(model, FusedDecoder)
    calls = []
    decode = model.decode
    model.decode = lambda *given, **named: calls.append(len(given[0])) or decode(*given, **named)  # type: ignore[func-returns-value, method-assign]
    outputs(replace(fused, model=model), whole_steps=True)
    assert calls.count(5) > 30


def test_large_models_and_other_dtypes_stay_with_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_random_model(tmp_path, {**BASE, **MODELS["llama"]}, seed=3)
    half = load_model(tmp_path, dtype="float16").model
    assert not isinstance(half, FusedDecoder)
    assert (half.products, FusedDecoder.products) == ("torch", "packed")  # as an engine tells on its control socket
    monkeypatch.setattr("engine.models.fused_decoder.MOST_PACKED_BYTES", 1000)
    assert not isinstance(load_model(tmp_path, dtype="float32").model, FusedDecoder)
