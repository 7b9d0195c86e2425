"""What clients send and get is in no log, whatever goes wrong with it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from engine.logs import JsonLines

MARK = "correct horse battery staple"
IDS = [ord(letter) for letter in "tr0ub4dor"]


def test_neither_prompts_nor_answers_are_logged(serve: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    server = serve(next_token=lambda request: ord("Z") if len(request.output_ids) % 2 else ord("Q"))
    chat = [{"role": "user", "content": MARK}]
    sent: list[tuple[str, Any]] = [
        ("/v1/completions", {"prompt": MARK, "max_tokens": 8, "ignore_eos": True}),
        ("/v1/completions", {"prompt": MARK, "max_tokens": 8, "ignore_eos": True, "stream": True}),
        ("/v1/completions", {"prompt": IDS, "max_tokens": 4}),
        ("/v1/completions", {"prompt": MARK, "max_tokens": -1}),
        ("/v1/completions", {"prompt": MARK * 1000, "max_tokens": 8}),
        ("/v1/completions", {"prompt": MARK, "kv_format_flor": MARK}),
        ("/v1/chat/completions", {"messages": chat, "max_tokens": 4}),
        ("/v1/chat/completions", {"messages": MARK, "max_tokens": 4}),
        ("/tokenize", {"prompt": MARK}),
    ]
    with httpx.Client(base_url=server.url, trust_env=False, timeout=30) as http:
        answers = [http.post(path, json=body).status_code for path, body in sent]
        http.post("/v1/completions", content=b'{"prompt": "' + MARK.encode())
        http.post(f"/v1/{MARK}", json={})

        def fail(_plan: object) -> None:
            raise RuntimeError("the step is torn")

        server.engine.runner.before = fail
        answers.append(http.post("/v1/completions", json=sent[0][1]).status_code)
    server.stop()
    assert answers[:3] == [200, 200, 200]
    assert answers[3] == 400
    assert answers[-1] >= 500
    ours = [record for record in caplog.records if record.name.split(".")[0] not in {"httpx", "httpcore"}]
    told = "\n".join(JsonLines().format(record) for record in ours)
    assert "the step is torn" in told, "nothing was captured"
    for secret in (MARK, MARK.replace(" ", "%20"), "QZQZ", str(IDS), str([*MARK.encode()][:6])[1:-1]):
        assert secret not in told, secret
