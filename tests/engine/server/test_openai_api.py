from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from waiting import Brake, until

from engine.server.app import AppOptions
from engine.server.errors import BadRequest
from engine.server.intake import Intake, ServedModel
from engine.server.protocol import ChatRequest, CompletionRequest, parse
from engine.server.run import ServerOptions

Serve = Callable[..., Any]
PATH = "/v1/completions"


def scripted(text: str) -> Callable[[Any], int]:
    """The bytes of a text, then the end token."""
    ids = [*text.encode(), 257]
    return lambda request: ids[min(len(request.output_ids), len(ids) - 1)]


@pytest.fixture
def server(serve: Serve) -> Any:
    return serve()


@pytest.fixture
def http(server: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=20, trust_env=False) as client:
        yield client


def events(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def text_of(chunks: list[dict[str, Any]]) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


# The openai client


def test_openai_client_completions_and_chat(server: Any) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0)
    assert [model.id for model in client.models.list().data] == ["bytes"]
    assert client.models.retrieve("bytes").id == "bytes"
    whole = client.completions.create(model="bytes", prompt="import os", max_tokens=5, temperature=0)
    assert len(whole.choices[0].text) == 5
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (9, 5)
    assert whole.choices[0].finish_reason == "length"
    chunks = list(client.completions.create(model="bytes", prompt="import os", max_tokens=5, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"

    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    answer = client.chat.completions.create(
        model="bytes", messages=messages, max_completion_tokens=8, logprobs=True, top_logprobs=2
    )
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    assert len(answer.choices[0].logprobs.content) == 8
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
    parts = list(
        client.chat.completions.create(
            model="bytes",
            messages=messages,
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
    )
    assert parts[0].choices[0].delta.role == "assistant"
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == answer.choices[0].message.content
    assert parts[-1].choices == []
    assert parts[-1].usage is not None
    assert parts[-1].usage.completion_tokens == 8


def test_openai_client_sees_typed_errors(server: Any) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0)
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-5", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as many:
        client.completions.create(model="bytes", prompt="x", n=2)
    assert many.value.param == "n"


# Prompts and limits


@pytest.mark.parametrize(
    ("prompt", "expected_tokens"),
    [("ab c", 4), ([97, 98], 2), ([[97, 98, 99]], 3), (["xyz"], 3), ("   ", 3), ("héé", 5)],
)
def test_prompt_forms(http: httpx.Client, prompt: Any, expected_tokens: int) -> None:
    answer = http.post(PATH, json={"model": "bytes", "prompt": prompt, "max_tokens": 1})
    assert answer.status_code == 200
    assert answer.json()["usage"]["prompt_tokens"] == expected_tokens


BAD = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({}, "prompt"),
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": [[1], [2]]}, "prompt"),
    ({"prompt": [300]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "x", "max_tokens": -1}, "max_tokens"),
    ({"prompt": "x", "max_tokens": "5"}, "max_tokens"),
    ({"prompt": "x", "max_tokens": 10**30}, None),
    ({"prompt": "x" * 1023, "max_tokens": 2}, None),
    ({"prompt": "x" * 2000, "max_tokens": 1}, None),
    ({"prompt": "x", "n": 2}, "n"),
    ({"prompt": "x", "best_of": 3}, "best_of"),
    ({"prompt": "x", "temperature": -0.1}, "temperature"),
    ({"prompt": "x", "temperature": "hot"}, "temperature"),
    ({"prompt": "x", "top_p": 0}, "top_p"),
    ({"prompt": "x", "repetition_penalty": 1e-40}, "repetition_penalty"),
    ({"prompt": [-1], "echo": True}, "prompt"),
    ({"prompt": "x", "logprobs": 1000}, "logprobs"),
    ({"prompt": "x", "stop": [""]}, "stop"),
    ({"prompt": "x", "stop": ["s"] * 17}, "stop"),
    ({"prompt": "x", "kv_format_floor": "int2"}, "kv_format_floor"),
    ({"prompt": "x", "prefix_ttl_s": 0}, "prefix_ttl_s"),
    ({"prompt": "x", "prefix_ttl_s": 1e9}, "prefix_ttl_s"),
    ({"prompt": "x", "prefix_ttl_s": "long"}, "prefix_ttl_s"),
    ({"prompt": "x", "prefix_ttl_s": 5, "use_prefix_cache": False}, "prefix_ttl_s"),
    ({"prompt": "x", "logit_bias": {"5": 1}}, "logit_bias"),
    ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": "x", "seed": 1 << 70}, "seed"),
]


def test_bad_requests_are_refused_one_by_one_and_the_engine_lives(http: httpx.Client) -> None:
    """Case G.26 and its kind."""
    for fields, param in BAD:
        body = json.dumps({"model": "bytes", **fields})
        answer = http.post(PATH, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400, (fields, answer.text)
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        if param is not None:
            assert error["param"] == param, (fields, error)
    assert http.get("/health").status_code == 200
    assert http.post(PATH, json={"prompt": "x", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[1]", 400),
        (b"\xff\xfe", 400),
        (b'{"prompt": ' + b"[" * 5000, 400),
        (b'{"prompt": "x", "seed": ' + b"9" * 6000 + b"}", 400),
        (b'{"prompt": "x", "temperature": NaN}', 400),
        (b'{"prompt": "' + b"x" * 70_000 + b'"}', 413),
    ],
)
def test_bodies_that_are_no_requests(serve: Serve, content: bytes, status: int) -> None:
    server = serve(server=ServerOptions(grace_s=0, app=AppOptions(max_body_bytes=65_536)))
    answer = httpx.post(server.url + PATH, content=content, trust_env=False)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]
    assert "x-request-id" in answer.headers


@pytest.mark.parametrize("variables", [{"self": 1}, {"messages": []}, {"bos_token": "x"}])
def test_template_variables_that_are_ours(http: httpx.Client, variables: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "chat_template_kwargs": variables}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "chat_template_kwargs"


@pytest.mark.parametrize("control", [False, True])
def test_a_client_that_hangs_up_within_its_body_is_no_error(
    server: Any, caplog: pytest.LogCaptureFixture, control: bool
) -> None:
    host, _, port = server.url.removeprefix("http://").partition(":")
    path, method = ("/v1/tunables", "PATCH") if control else (PATH, "POST")
    family = socket.AF_UNIX if control else socket.AF_INET
    with socket.socket(family) as client:
        client.settimeout(10)
        client.connect(str(server.control_path) if control else (host, int(port)))
        client.sendall(f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode())
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1) == b""
    assert httpx.get(server.url + "/health", trust_env=False).status_code == 200
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_text_whose_tokens_the_model_does_not_have(served: ServedModel) -> None:
    """Otherwise the step that looks them up fails, and with it every request that it computes."""
    intake = Intake(replace(served, vocab_size=100))
    completion, chat = {"prompt": "az"}, {"messages": [{"role": "user", "content": "a"}]}
    with pytest.raises(BadRequest, match="token id 122 is outside the vocabulary of 100"):
        asyncio.run(intake.completion(parse(CompletionRequest, completion), "id", 0))
    with pytest.raises(BadRequest, match="outside the vocabulary of 100"):
        asyncio.run(intake.chat(parse(ChatRequest, chat), "id", 0))


def half_a_request(server: Any) -> socket.socket:
    host, _, port = server.url.removeprefix("http://").partition(":")
    client = socket.create_connection((host, int(port)), timeout=20)
    client.sendall(f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode())
    return client


def test_a_body_that_never_comes_is_given_up(serve: Serve) -> None:
    server = serve(server=ServerOptions(grace_s=0, app=AppOptions(body_timeout_s=0.05)))
    with half_a_request(server) as client, client.makefile("rb") as answer:
        text = answer.read()  # to the end: the connection closes
    assert text.startswith(b"HTTP/1.1 408 ")
    assert b"body_too_slow" in text
    assert httpx.get(server.url + "/health", trust_env=False).status_code == 200


def test_half_a_request_does_not_make_the_end_noisy(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    server = serve()
    with half_a_request(server) as client, client.makefile("rb") as answer:
        assert httpx.get(server.url + "/health", trust_env=False).status_code == 200
        server.stop()
        assert answer.read().startswith(b"HTTP/1.1 503 ")
    assert not [record for record in caplog.records if record.exc_info]


def test_unknown_paths_methods_and_models(http: httpx.Client) -> None:
    for answer, status in [
        (http.get("/nothing"), 404),
        (http.get(PATH), 405),
        (http.post("/v1/models"), 405),
        (http.get("/v1/models/other"), 404),
        (http.post(PATH, json={"model": "other", "prompt": "x"}), 404),
    ]:
        assert answer.status_code == status
        assert "message" in answer.json()["error"]
    assert "access-control-allow-origin" not in http.get("/health", headers={"origin": "http://evil"}).headers


def test_random_model_names_make_no_series(http: httpx.Client) -> None:
    """Case I.35, over HTTP and scaled."""
    http.post(PATH, json={"model": "bytes", "prompt": "x", "max_tokens": 1})
    http.get("/metrics")

    def series() -> int:
        return sum(not line.startswith("#") for line in http.get("/metrics").text.splitlines())

    http.post(PATH, json={"model": "m", "prompt": "x"})
    before = series()
    for i in range(200):
        http.post(PATH, json={"model": f"random-{i}", "user": f"u{i}", "prompt": "x"})
    assert series() == before
    assert "random-" not in http.get("/metrics").text


def test_full_queue_answers_429_and_then_recovers(serve: Serve) -> None:
    server = serve(max_waiting=2, max_num_seqs=1)
    brake = server.engine.runner.before = Brake()
    counters, scheduler = server.engine.stats.counters, server.engine.scheduler
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as http:
        done: list[int] = []

        def send() -> None:
            body = {"prompt": "x", "max_tokens": 900, "ignore_eos": True}
            answer = httpx.post(server.url + PATH, json=body, trust_env=False, timeout=60)
            done.append(answer.status_code)

        threads = [threading.Thread(target=send) for _ in range(8)]
        threads[0].start()
        until(lambda: len(scheduler.running) == 1, "the first to run")
        for thread in threads[1:]:
            thread.start()
        until(lambda: counters.requests_offered == 8, "all to arrive")
        brake.let_go()
        for thread in threads:
            thread.join(60)
        assert sorted(done) == [200] * 3 + [429] * 5  # one ran, two waited
        assert http.post(PATH, json={"prompt": "x", "max_tokens": 2}).status_code == 200
        metrics = http.get("/metrics").text
        assert f"autotune_engine_requests_rejected_total {float(done.count(429))}" in metrics


def test_retry_after_comes_with_429(serve: Serve) -> None:
    server = serve(max_waiting=0)
    answer = httpx.post(server.url + PATH, json={"prompt": "x"}, trust_env=False)
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["code"] == "queue_full"


def test_larger_than_the_pool_is_a_clear_400(serve: Serve) -> None:
    """Case G.24."""
    server = serve(pool_tokens=768, max_model_len=8192)
    with httpx.Client(base_url=server.url, timeout=20, trust_env=False) as http:
        answer = http.post(PATH, json={"prompt": [97] * 784, "max_tokens": 1})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "can_never_fit"
        assert http.post(PATH, json={"prompt": "x", "max_tokens": 3}).status_code == 200


# Answers


def test_usage_modes_of_a_stream(http: httpx.Client) -> None:
    body = {"prompt": "abc", "max_tokens": 4, "stream": True, "ignore_eos": True}
    plain = events(http.post(PATH, json=body))
    assert all("usage" not in chunk for chunk in plain)
    final = events(http.post(PATH, json={**body, "stream_options": {"include_usage": True}}))
    assert [chunk["usage"] for chunk in final[:-1]] == [None] * (len(final) - 1)
    assert final[-1]["choices"] == []
    assert final[-1]["usage"]["total_tokens"] == 7
    options = {"include_usage": True, "continuous_usage_stats": True}
    running = events(http.post(PATH, json={**body, "stream_options": options}))
    counts = [chunk["usage"]["completion_tokens"] for chunk in running]
    assert counts == sorted(counts)
    assert counts[-1] == counts[-2] == 4
    assert text_of(plain) == text_of(final) == text_of(running)


@pytest.mark.parametrize("eviction", ["window", "heavy_hitter"])
def test_usage_says_what_eviction_dropped(serve: Serve, eviction: str) -> None:
    """This runner reports no attention, so heavy_hitter keeps the most recent tokens too."""
    server = serve(eviction=eviction, keep_tokens=128)
    with httpx.Client(base_url=server.url, timeout=20, trust_env=False) as http:
        body = {"prompt": "x" * 300, "max_tokens": 40, "ignore_eos": True}
        usage = http.post(PATH, json=body).json()["usage"]
        assert usage["evicted_tokens"] == (300 + 39 - 128) // 16 * 16 - 16
        spared = http.post(PATH, json={**body, "allow_eviction": False}).json()["usage"]
        assert spared["evicted_tokens"] == 0
        page = http.get("/metrics").text
        assert f"autotune_engine_evicted_tokens_total {float(usage['evicted_tokens'])}" in page


def test_returned_token_ids(http: httpx.Client) -> None:
    body = {"prompt": "abc", "max_tokens": 4, "return_token_ids": True}
    choice = http.post(PATH, json=body).json()["choices"][0]
    assert choice["prompt_token_ids"] == [97, 98, 99]
    assert bytes(choice["token_ids"]).decode() == choice["text"]
    chunks = events(http.post(PATH, json={**body, "stream": True}))
    assert chunks[0]["choices"][0]["prompt_token_ids"] == [97, 98, 99]
    assert not any("prompt_token_ids" in chunk["choices"][0] for chunk in chunks[1:])
    ids = [token_id for chunk in chunks for token_id in chunk["choices"][0]["token_ids"]]
    assert ids == choice["token_ids"]
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "return_token_ids": True}
    whole = http.post("/v1/chat/completions", json=chat).json()
    assert whole["prompt_token_ids"][:4] == [*b"user"]
    assert len(whole["choices"][0]["token_ids"]) == 3
    parts = events(http.post("/v1/chat/completions", json={**chat, "stream": True}))
    assert parts[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert [i for part in parts[1:] for i in part["choices"][0]["token_ids"]] == whole["choices"][0]["token_ids"]


def test_echo_and_logprobs(http: httpx.Client) -> None:
    body = {"prompt": "abc", "max_tokens": 2, "echo": True, "logprobs": 2}
    choice = http.post(PATH, json=body).json()["choices"][0]
    assert choice["text"].startswith("abc")
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["token_logprobs"] == [None, -0.25, -0.25, -0.25, -0.25]
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4]
    assert logprobs["top_logprobs"][0] is None
    assert set(logprobs["top_logprobs"][1]) >= {"a", "b"}
    chunks = events(http.post(PATH, json={**body, "stream": True}))
    assert text_of(chunks) == choice["text"]
    assert [t for chunk in chunks for t in chunk["choices"][0]["logprobs"]["tokens"]] == logprobs["tokens"]
    only = http.post(PATH, json={**body, "max_tokens": 0}).json()
    assert only["choices"][0]["text"] == "abc"
    assert only["choices"][0]["logprobs"]["tokens"] == ["a", "b", "c"]
    assert only["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("length", [15, 16, 17, 32, 33, 100])
def test_prompt_logprobs_twice(http: httpx.Client, length: int) -> None:
    """Case B.9 at the API: one entry per prompt token, the same when the prompt is cached."""
    prompt = [i % 200 + 10 for i in range(length)]
    answers = [
        http.post(PATH, json={"prompt": prompt, "max_tokens": 1, "prompt_logprobs": 1}).json()["choices"][0]
        for _ in range(2)
    ]
    scored = answers[0]["prompt_logprobs"]
    assert len(scored) == length
    assert scored[0] is None
    assert all(str(token_id) in row for token_id, row in zip(prompt[1:], scored[1:], strict=True))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_never_leak(serve: Serve, stream: bool) -> None:
    """Case H.29 over HTTP, through the server's own token-by-token path."""
    server = serve(next_token=scripted("ab DEFX cd DEFGHIJ tail"))
    body = {"prompt": "x", "max_tokens": 100, "stop": ["DEFGHIJ", "GHIJ t"], "stream": stream}
    answer = httpx.post(server.url + PATH, json=body, trust_env=False)
    if stream:
        chunks = events(answer)
        text, last = text_of(chunks), chunks[-1]["choices"][0]
    else:
        last = answer.json()["choices"][0]
        text = last["text"]
        assert answer.json()["usage"]["completion_tokens"] == len("ab DEFX cd DEFGHIJ")
    assert text == "ab DEFX cd "
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "DEFGHIJ")
    stats = server.engine.core.stats
    assert httpx.get(server.url + "/health", trust_env=False).status_code == 200
    assert stats().counters.requests_aborted == 0


@pytest.mark.parametrize("stream", [False, True])
def test_characters_split_over_tokens(serve: Serve, stream: bool) -> None:
    """Case H.31 over HTTP: every byte of the emoji is a token of its own."""
    text = "héllo 👩\u200d🚀 日本"
    server = serve(next_token=scripted(text))
    answer = httpx.post(server.url + PATH, json={"prompt": "x", "max_tokens": 99, "stream": stream}, trust_env=False)
    got = text_of(events(answer)) if stream else answer.json()["choices"][0]["text"]
    assert got == text
    cut = httpx.post(server.url + PATH, json={"prompt": "x", "max_tokens": 2, "stream": stream}, trust_env=False)
    got = text_of(events(cut)) if stream else cut.json()["choices"][0]["text"]
    assert got == "h\ufffd"


def test_eos_ends_unless_ignored_and_is_not_shown(serve: Serve) -> None:
    server = serve(next_token=scripted("ok"))
    with httpx.Client(base_url=server.url, trust_env=False) as http:
        choice = http.post(PATH, json={"prompt": "x", "max_tokens": 9}).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ok", "stop", None)
        body = {"prompt": "x", "max_tokens": 9, "ignore_eos": True}
        longer = http.post(PATH, json=body).json()
        assert longer["usage"]["completion_tokens"] == 9
        assert longer["choices"][0]["finish_reason"] == "length"
        body = {"prompt": "x", "max_tokens": 9, "stop_token_ids": [ord("k")]}
        stopped = http.post(PATH, json=body).json()["choices"][0]
        assert (stopped["text"], stopped["stop_reason"]) == ("o", ord("k"))


def test_request_ids_and_feedback(http: httpx.Client, server: Any) -> None:
    answer = http.post(PATH, json={"prompt": "x", "max_tokens": 1}, headers={"X-Request-Id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.json()["id"] == "cmpl-mine-1"
    made = http.post(PATH, json={"prompt": "x", "max_tokens": 1}, headers={"X-Request-Id": "bad id"})
    assert made.headers["x-request-id"] != "bad id"
    assert http.post("/v1/feedback", json={"request_id": "cmpl-mine-1", "score": 0.5}).status_code == 200
    assert http.post("/v1/feedback", json={"request_id": "mine-1", "score": 0.5}).status_code == 200
    assert http.post("/v1/feedback", json={"request_id": "mine-1", "score": 1}).status_code == 409
    assert http.post("/v1/feedback", json={"request_id": "unknown", "score": 1}).status_code == 404
    for score in (-0.1, 1.1, "good", None):
        assert http.post("/v1/feedback", json={"request_id": "mine-1", "score": score}).status_code == 400
    counters = server.engine.core.stats().counters
    assert (counters.feedback_count, counters.feedback_sum) == (1, 0.5)


def test_tokenize_health_metrics(http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"model": "bytes", "prompt": "hi"}).json()
    assert answer == {"count": 2, "max_model_len": 1024, "tokens": [104, 105]}
    chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": "a"}]}).json()
    assert bytes(chat["tokens"]).decode() == "user: a\nbot: "
    assert http.post("/tokenize", json={}).status_code == 400
    for path in ("/health", "/metrics"):
        assert http.head(path).status_code == 200
        assert http.get(path).status_code == 200
    assert "autotune_engine_kv_cache_usage" in http.get("/metrics").text


def test_a_failing_step_is_a_500_and_the_next_request_works(serve: Serve) -> None:
    server = serve()

    def explode(_plan: object) -> None:
        server.engine.runner.before = lambda _plan: None
        raise RuntimeError("boom")

    server.engine.runner.before = explode
    answer = httpx.post(server.url + PATH, json={"prompt": "x"}, trust_env=False)
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    server.engine.runner.before = explode
    streamed = events(httpx.post(server.url + PATH, json={"prompt": "x", "stream": True}, trust_env=False))
    assert "boom" in streamed[-1]["error"]["message"]
    assert httpx.post(server.url + PATH, json={"prompt": "x"}, trust_env=False).status_code == 200
