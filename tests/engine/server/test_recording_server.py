"""What a running engine records of the requests that it served."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from waiting import until

from autotune.replay.client import Client
from autotune.replay.handshake import learn
from autotune.replay.wire import Endpoint
from engine.clock import RealClock
from engine.recording import TrafficRecorder
from engine.server.run import ServerOptions
from envs.workload.loaders import load_trace

SECRET = "the launch code is 00000000, tell nobody about it, not even on Sundays. "


def test_a_recording_of_served_requests_is_a_trace_without_their_text(
    serve: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "own.csv"
    recorder = TrafficRecorder(path, RealClock())
    go_on = threading.Event()
    server = serve(server=ServerOptions(grace_s=0, recorder=recorder))
    with httpx.Client(base_url=server.url, timeout=30) as client:
        ask = {"model": "bytes", "prompt": SECRET, "max_tokens": 5, "ignore_eos": True}
        assert client.post("/v1/completions", json=ask).status_code == 200
        longer = {**ask, "prompt": SECRET + "And more.", "max_tokens": 3, "stream": True}
        assert "[DONE]" in client.post("/v1/completions", json=longer).text
        chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, "ignore_eos": True}
        assert client.post("/v1/chat/completions", json=chat).status_code == 200
        assert client.post("/v1/completions", json={"model": "bytes"}).status_code == 400
        assert client.post("/v1/completions", json={**ask, "prompt": "x" * 2000}).status_code == 400
        runner = server.engine.runner
        middle = len(runner.plans) + 20  # held before the request comes: 900 tokens may be out before this thread runs
        runner.before = lambda _plan: go_on.wait(30) if len(runner.plans) > middle else None
        with client.stream("POST", "/v1/completions", json={**ask, "max_tokens": 900, "stream": True}) as answer:
            next(line for line in answer.iter_lines() if line.startswith("data: {"))
        until(lambda: ",abort," in path.read_text(), "the client's hang-up to be noticed, within a step")
        go_on.set()
        assert client.post("/v1/completions", json=ask).status_code == 200
    server.stop()
    recorder.close()

    trace = load_trace(path)
    assert sorted(r.output_tokens for r in trace.requests)[:4] == [2, 3, 5, 5]
    assert len(trace.requests) == 5  # those that were refused are not load that was served
    first, second = trace.requests[:2]
    assert (first.prompt_tokens, second.prompt_tokens) == (len(SECRET), len(SECRET) + len("And more."))
    assert first.hash_ids == second.hash_ids[: len(first.hash_ids)]
    assert len(first.hash_ids) == first.prompt_tokens // 16
    content = path.read_text()
    for word in ("launch", "00000000", "Sundays", "hello", json.dumps(SECRET)):
        assert word not in content
    finishes = [line.split(",")[3] for line in content.splitlines()[1:]]
    assert sorted(finishes) == ["abort", "length", "length", "length", "length"]


def test_what_a_replay_asks_before_it_begins_is_not_recorded(serve: Callable[..., Any], tmp_path: Path) -> None:
    """A recorded load that is replayed against a recording engine gives the same load again."""
    path = tmp_path / "own.csv"
    recorder = TrafficRecorder(path, RealClock())
    server = serve(server=ServerOptions(grace_s=0, recorder=recorder))

    async def ask() -> bool:
        client = Client(Endpoint.parse(server.url), RealClock())
        try:
            return (await learn(client, model=None)).exact_tokens
        finally:
            client.close()

    assert asyncio.run(ask())
    assert server.engine.stats.counters.requests_completed == 1, "it did send a request"
    body = {"prompt": "hello", "max_tokens": 2, "ignore_eos": True}
    assert httpx.post(server.url + "/v1/completions", json=body, trust_env=False).status_code == 200
    server.stop()
    recorder.close()
    (only,) = load_trace(path).requests
    assert (only.prompt_tokens, only.output_tokens) == (5, 2)


def test_a_place_that_cannot_be_recorded_to_is_refused_before_the_model_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from engine import assembly
    from engine import serve as engine_serve

    def never(_options: object) -> None:
        raise AssertionError("the model was read")

    monkeypatch.setattr(assembly, "assemble", never)
    (tmp_path / "notes.txt").write_text("mine\n")
    folder = Path(engine_serve.__file__).parent / "bundled" / "model"
    arguments = ["--model", str(folder), "--port", "0", "--control", str(tmp_path / "c.sock")]
    assert engine_serve.main([*arguments, "--record", str(tmp_path / "notes.txt")]) == 1
    assert "exists and is no recording" in capsys.readouterr().err
    assert (tmp_path / "notes.txt").read_text() == "mine\n"
