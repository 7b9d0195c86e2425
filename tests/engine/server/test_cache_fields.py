"""What a request says about its KV: misspelt names are refused, others' fields are not, and wishes are answered."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from engine.server.cache_fields import CacheFields
from engine.server.errors import BadRequest
from engine.server.protocol import ChatRequest, CompletionRequest, parse

Serve = Callable[..., Any]
PATH = "/v1/completions"

MISSPELT = {
    "kv_format_flor": "kv_format_floor",
    "kv_format": "kv_format_floor",
    "KV_FORMAT_FLOOR": "kv_format_floor",
    "kvFormatFloor": "kv_format_floor",
    "format_floor": "kv_format_floor",
    "allow_evict": "allow_eviction",
    "allow-eviction": "allow_eviction",
    "no_eviction": "allow_eviction",
    "use_prefix_caching": "use_prefix_cache",
    "usePrefixCache": "use_prefix_cache",
    "cache_sal": "cache_salt",
    "prefix_ttl": "prefix_ttl_s",
    "prefix_ttl_seconds": "prefix_ttl_s",
}
# Fields of OpenAI's two endpoints, of vLLM's and of other servers that this engine does not know.
TOLERATED = (
    "audio", "function_call", "functions", "metadata", "modalities", "parallel_tool_calls", "prediction",
    "prompt_cache_key", "prompt_cache_retention", "reasoning_effort", "safety_identifier", "service_tier", "store",
    "tool_choice", "user", "verbosity", "web_search_options", "use_beam_search", "length_penalty",
    "skip_special_tokens", "spaces_between_special_tokens", "truncate_prompt_tokens", "allowed_token_ids",
    "structured_outputs", "guided_json", "kv_transfer_params", "priority", "request_id", "use_cache", "cache_control",
    "prefix", "cache_prompt", "cached_content", "documents", "chat_template", "mm_processor_kwargs", "nvext",
)  # fmt: skip


@pytest.mark.parametrize(("name", "meant"), MISSPELT.items())
def test_a_misspelt_field_is_refused_with_the_one_that_was_meant(name: str, meant: str) -> None:
    with pytest.raises(BadRequest, match=f": unknown field, did you mean {meant}\\?") as refused:
        parse(CompletionRequest, {"prompt": "x", name: None})
    assert (refused.value.param, refused.value.code) == (name, "unknown_field")
    with pytest.raises(BadRequest, match=meant):
        parse(ChatRequest, {"messages": [{"role": "user", "content": "x"}], name: 1})


def test_fields_of_others_stay_tolerated() -> None:
    parse(CompletionRequest, {"prompt": "x", **dict.fromkeys(TOLERATED, 1)})


def test_every_field_of_ours_is_known() -> None:
    known = {"kv_format_floor": "int8", "allow_eviction": False, "use_prefix_cache": True, "cache_salt": "a"}
    body = parse(CompletionRequest, {"prompt": "x", **known, "prefix_ttl_s": 60})
    assert set(CacheFields.model_fields) == {*known, "prefix_ttl_s"}
    assert body.model_dump(include=set(known)) == known


def test_a_value_that_is_not_offered_is_told_without_the_library_s_words() -> None:
    with pytest.raises(BadRequest) as refused:
        parse(CompletionRequest, {"prompt": "x", "kv_format_floor": "int2"})
    assert refused.value.message == "kv_format_floor: choose one of native, int8, k8v4, int4"


@pytest.mark.parametrize("name", ["kv_\ud800", "prefix_" + "x" * 100_000])
def test_names_that_are_no_text_or_have_no_end(serve: Serve, name: str) -> None:
    server = serve()
    body = json.dumps({"prompt": "x", "max_tokens": 1, name: 1})
    answer = httpx.post(server.url + PATH, content=body, trust_env=False)
    assert answer.status_code == 400, answer.text
    assert len(answer.text) < 1000


def test_a_prefix_that_is_not_kept_is_told(serve: Serve) -> None:
    server = serve(pool_tokens=2048)  # a quarter, 512 tokens, may be pinned
    with httpx.Client(base_url=server.url, timeout=20, trust_env=False) as http:

        def pinned(first: int, tokens: int = 400, **fields: Any) -> Any:
            body = {"prompt": [first] * tokens, "max_tokens": 2, **fields}
            whole = http.post(PATH, json=body)
            assert whole.status_code == 200, whole.text
            return whole.json()["usage"].get("pinned_tokens")

        assert pinned(97) is None
        assert pinned(97, prefix_ttl_s=60) == 400
        assert pinned(97, prefix_ttl_s=60) == 400, "renewed"
        assert pinned(98, prefix_ttl_s=60) == 0, "beyond the share of the pool"
        assert pinned(99, 15, prefix_ttl_s=60) == 0, "not even one whole chunk of 16"
        assert server.engine.stats.counters.prefix_pins_refused == 1
        body = {
            "messages": [{"role": "user", "content": "x" * 200}],
            "max_tokens": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
            "prefix_ttl_s": 60,
        }
        lines = [line for line in http.post("/v1/chat/completions", json=body).text.split("\n\n") if line]
        assert json.loads(lines[-2].removeprefix("data: "))["usage"]["pinned_tokens"] == 0
