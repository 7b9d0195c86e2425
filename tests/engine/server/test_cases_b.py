"""Case B.9 over HTTP, with a real model behind the real server."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor

from engine.loader import LoadedModel, load_model
from engine.model_runner import ModelRunner
from engine.models.random_model import write_random_model
from kernels import ops
from kernels.layout import BLOCK_SIZES

TOLERANCE = 0.05  # of bfloat16
Serve = Callable[..., Any]
Json = dict[str, Any]
PATH, CHAT = "/v1/completions", "/v1/chat/completions"
# One layer and one head of 8 channels in 16 bits: the KV shape of the fake engine in conftest.
CONFIG: Json = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 258,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 1024,
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = tmp_path_factory.mktemp("cases") / "model"
    return load_model(write_random_model(folder, CONFIG, seed=9, deviation=0.25), dtype="bfloat16")


def dense_logprobs(loaded: LoadedModel, ids: Sequence[int]) -> list[float]:
    """Of every token after the first, by plain attention over the whole prompt."""

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # noqa: ARG001 - one layer
        heads = query.shape[1]
        out = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None].float(),
            key.repeat_interleave(heads, 1).transpose(0, 1)[None].float(),
            value.repeat_interleave(heads, 1).transpose(0, 1)[None].float(),
            is_causal=True,
        )
        return out[0].transpose(0, 1).contiguous().to(query.dtype)

    with torch.inference_mode():
        hidden = loaded.model.hidden(torch.tensor(ids), torch.arange(len(ids)), len(ids), attend)
        table = torch.log_softmax(loaded.model.logits(hidden).float(), -1)
    return [float(table[i, token]) for i, token in enumerate(ids[1:])]


def assert_scored(rows: Sequence[Json | None], ids: Sequence[int], dense: Sequence[float]) -> None:
    """One entry per prompt token, None for the first; each names its token with the right value."""
    assert len(rows) == len(ids)
    assert rows[0] is None
    found = [row[str(token)]["logprob"] for row, token in zip(rows[1:], ids[1:], strict=True) if row is not None]
    assert found == pytest.approx(dense, abs=TOLERANCE)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_prompt_logprobs_of_a_repeated_prompt(serve: Serve, loaded: LoadedModel, block_size: int) -> None:
    """vllm-project/vllm#8268 by every way that the API has to ask, with plain requests in between that do hit."""
    server = serve(block_size=block_size, pool_tokens=16384)
    sizes = [server.engine.cache.group_arena_bytes(0)]
    server.engine.core._runner = ModelRunner(loaded, sizes, ops, rng=random.Random(0))
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as http:
        for length in (block_size - 1, block_size, block_size + 1, 2 * block_size, 2 * block_size + 1):
            rng = random.Random(length)
            ids = [rng.randrange(256) for _ in range(length)]
            plain = {"prompt": ids, "max_tokens": 2, "temperature": 0, "return_token_ids": True}
            scored = {**plain, "prompt_logprobs": 2}
            first = http.post(PATH, json=scored).json()["choices"][0]
            hits = [http.post(PATH, json=plain).json() for _ in range(2)]
            second = http.post(PATH, json=scored).json()["choices"][0]
            dense = dense_logprobs(loaded, ids)
            assert_scored(first["prompt_logprobs"], ids, dense)
            assert second == first
            # The plain one takes what is cached and still computes the last token.
            assert hits[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == (length - 1) // 16 * 16
            assert hits[0]["choices"] == hits[1]["choices"]
            assert hits[1]["choices"][0]["token_ids"] == first["token_ids"]
            streamed = events(http.post(PATH, json={**scored, "stream": True}))
            rows = [row for chunk in streamed for row in chunk["choices"][0].get("prompt_logprobs", ())]
            assert rows == first["prompt_logprobs"]
            echoed = http.post(PATH, json={**plain, "echo": True, "logprobs": 0, "max_tokens": 0}).json()
            values = echoed["choices"][0]["logprobs"]["token_logprobs"]
            assert values[0] is None
            assert values[1:] == pytest.approx(dense, abs=TOLERANCE)


def events(response: httpx.Response) -> list[Json]:
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def test_prompt_logprobs_of_a_repeated_chat(serve: Serve, loaded: LoadedModel) -> None:
    """vllm-project/vllm#8268 for chats: whole and streamed, the first time and again."""
    server = serve(pool_tokens=16384)
    sizes = [server.engine.cache.group_arena_bytes(0)]
    server.engine.core._runner = ModelRunner(loaded, sizes, ops, rng=random.Random(0))
    body = {
        "messages": [{"role": "user", "content": "a chat that is longer than one block"}],
        "max_tokens": 3, "temperature": 0, "prompt_logprobs": 0, "return_token_ids": True,
    }  # fmt: skip
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as http:
        first, second = (http.post(CHAT, json=body).json() for _ in range(2))
        assert_scored(
            first["prompt_logprobs"], first["prompt_token_ids"], dense_logprobs(loaded, first["prompt_token_ids"])
        )
        assert second["prompt_logprobs"] == first["prompt_logprobs"]
        chunks = events(http.post(CHAT, json={**body, "stream": True}))
        rows = [row for chunk in chunks for row in chunk.get("prompt_logprobs", ())]
        assert rows == first["prompt_logprobs"]
