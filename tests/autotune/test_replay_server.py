"""The replay client and its command line against a small OpenAI-like server that misbehaves on request."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.cli import app
from autotune.cli._shared import fail_with
from autotune.replay.client import Client
from autotune.replay.handshake import Server, ServerError, learn
from autotune.replay.records import Outcome, RequestRecord
from autotune.replay.runner import Progress, replay
from autotune.replay.wire import Endpoint
from engine.clock import RealClock
from envs.workload.trace import Trace, TraceRequest


class FakeServer:
    """Streams as many tokens as asked for. ``behaviour`` picks what goes wrong; ``bodies`` are what it got."""

    def __init__(self, *, ids: bool = True, extras: bool = True, tokenize: bool = True) -> None:
        self.ids, self.extras, self.tokenize = ids, extras, tokenize
        self.behaviour = "good"
        self.bodies: list[dict[str, Any]] = []
        self.connections = 0
        self.streaming = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._ready.wait(60)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)

    def _run(self) -> None:
        server = self._loop.run_until_complete(asyncio.start_server(self._connection, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                _, path, _ = head.split("\r\n", 1)[0].split(" ")
                length = int(head.lower().split("content-length:")[1].split("\r\n")[0])
                body = json.loads(await reader.readexactly(length)) if length else {}
                if not await self._answer(writer, path, body):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, path: str, body: dict[str, Any]) -> bool:
        if path == "/v1/models":
            return self._json(writer, 200, {"data": [{"id": "m", "max_model_len": 64}]})
        if path == "/tokenize" and self.tokenize:
            return self._json(writer, 200, {"tokens": list(range(300, 500))})
        if path != "/v1/completions":
            return self._json(writer, 404, {"error": {"message": "no such path"}})
        if not self.ids and not isinstance(body["prompt"], str):
            return self._json(writer, 400, {"error": {"message": "prompt must be a string"}})
        if not self.extras and "ignore_eos" in body:
            return self._json(writer, 422, {"detail": "unknown field ignore_eos"})
        if not body.get("stream"):
            assert "stream_options" not in body
            words = len(body["prompt"].split()) if isinstance(body["prompt"], str) else len(body["prompt"])
            return self._json(writer, 200, {"choices": [{"text": "x"}], "usage": {"prompt_tokens": 2 * words}})
        self.bodies.append(body)
        return await self._stream(writer, body)

    def _json(self, writer: asyncio.StreamWriter, status: int, document: dict[str, Any]) -> bool:
        data = json.dumps(document).encode()
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        return True

    async def _stream(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> bool:
        if self.behaviour == "busy":
            return self._json(writer, 429, {"error": {"message": "queue is full"}})
        if self.behaviour == "close":
            return False
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        number = body["max_tokens"] - (self.behaviour == "short")
        for i in range(number):
            choice: dict[str, Any] = {"text": "" if i % 3 == 1 else "w", "finish_reason": None}
            if "return_token_ids" in body:
                choice["token_ids"] = [i]
            self._event(writer, {"choices": [choice]})
            self.streaming.set()
            if self.behaviour == "drop":
                return False
            if self.behaviour == "error":
                self._event(writer, {"error": {"message": "engine died"}})
                break
            if self.behaviour == "stall":
                await writer.drain()
                await asyncio.Event().wait()
        if self.behaviour not in {"error", "unfinished"}:
            self._event(writer, {"choices": [{"text": "", "finish_reason": "length"}]})
            usage = {"completion_tokens": number, "prompt_tokens_details": {"cached_tokens": 4}}
            self._event(writer, {"choices": [], "usage": usage})
        self._chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        return True

    def _event(self, writer: asyncio.StreamWriter, document: dict[str, Any]) -> None:
        self._chunk(writer, b"data: " + json.dumps(document).encode() + b"\n\n")

    @staticmethod
    def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()


def trace_of(number: int = 5, gap_s: float = 0.0) -> Trace:
    return Trace("t", tuple(TraceRequest(i * gap_s, 10 + i, 3 + i, (7, i)) for i in range(number)), 4.0)


async def run(fake: FakeServer, trace: Trace, *, timeout_s: float = 60.0, connections: int = 64) -> list[RequestRecord]:
    client = Client(Endpoint.parse(fake.url), RealClock(), timeout_s=60)
    server = await learn(client, model=None)
    client.close()
    client = Client(Endpoint.parse(fake.url), RealClock(), timeout_s=timeout_s, max_connections=connections)
    progress = Progress(len(trace.requests), trace.duration_s)
    await replay(trace, client, server, progress, stop=asyncio.Event(), seed=0)
    return progress.records


def test_every_token_is_recorded_and_prefixes_are_shared(fake: FakeServer) -> None:
    records = asyncio.run(run(fake, trace_of()))
    assert [record.outcome for record in records] == [Outcome.COMPLETED] * 5
    assert [record.output_tokens for record in records] == [3, 4, 5, 6, 7]
    assert [len(record.token_times_s) for record in records] == [3, 4, 5, 6, 7]
    assert all(record.cached_tokens == 4 and record.finish_reason == "length" for record in records)
    prompts = [body["prompt"] for body in fake.bodies]
    assert sorted(len(prompt) for prompt in prompts) == [10, 11, 12, 13, 14]
    assert len({tuple(prompt[:4]) for prompt in prompts}) == 1
    assert len({tuple(prompt[:8]) for prompt in prompts}) == 5
    assert all(300 <= token < 500 for prompt in prompts for token in prompt)


@pytest.mark.parametrize(
    ("behaviour", "failure", "words"),
    [
        ("busy", "http_429", "queue is full"),
        ("close", "disconnected", "closed by the server"),
        ("drop", "disconnected", "closed by the server"),
        ("error", "stream_error", "engine died"),
        ("unfinished", "incomplete", "without a finish reason"),
        ("short", "wrong_length", "2 tokens instead of 3"),
        ("stall", "timeout", "no end within 0.3 s"),
    ],
)
def test_failures_are_told_apart(fake: FakeServer, behaviour: str, failure: str, words: str) -> None:
    fake.behaviour = behaviour
    records = asyncio.run(run(fake, trace_of(1), timeout_s=0.3 if behaviour == "stall" else 60))
    assert (records[0].outcome, records[0].failure) == (Outcome.FAILED, failure)
    assert words in records[0].message


def test_arrivals_do_not_wait_for_answers_or_connections(fake: FakeServer) -> None:
    fake.behaviour = "stall"
    records = asyncio.run(run(fake, trace_of(6, gap_s=0.01), timeout_s=2.0, connections=4))
    assert [record.failure for record in records] == ["timeout"] * 4 + ["connection_limit"] * 2
    assert all(record.send_delay_s is None or record.send_delay_s < 1.0 for record in records)


def test_connections_are_reused_and_stale_ones_replaced(fake: FakeServer) -> None:
    async def twice() -> list[Outcome]:
        client = Client(Endpoint.parse(fake.url), RealClock(), timeout_s=60)
        server = Server("m", None, (1, 2, 3), 1.0)
        records = [RequestRecord(i, 0.0, 4, 2) for i in range(3)]
        body = server.body(server.prompts(trace_of(), 0), TraceRequest(0, 4, 2), 0)
        await client.stream(records[0], body, exact_tokens=True)
        await client.stream(records[1], body, exact_tokens=True)
        for connection in client._idle:
            connection.close()
        await client.stream(records[2], body, exact_tokens=True)
        client.close()
        return [record.outcome for record in records]

    assert asyncio.run(twice()) == [Outcome.COMPLETED] * 3
    assert fake.connections == 2


@pytest.mark.parametrize(("ids", "extras"), [(True, True), (False, True), (True, False), (False, False)])
def test_requests_take_the_form_that_the_server_accepts(ids: bool, extras: bool) -> None:
    fake = FakeServer(ids=ids, extras=extras)
    try:
        records = asyncio.run(run(fake, trace_of(2)))
    finally:
        fake.close()
    assert [record.output_tokens for record in records] == [3, 4]
    assert all(isinstance(body["prompt"], list) is ids for body in fake.bodies)
    assert all(("ignore_eos" in body) is extras for body in fake.bodies)
    if not ids:
        assert len(fake.bodies[0]["prompt"].split()) == pytest.approx(5, abs=1)  # two tokens a word, it said


def test_without_tokenize_prompts_are_text_unless_told_the_vocabulary() -> None:
    fake = FakeServer(tokenize=False)

    async def ask(vocab: int | None, text: bool) -> Server:
        client = Client(Endpoint.parse(fake.url), RealClock())
        try:
            return await learn(client, model="m", vocab=vocab, text=text)
        finally:
            client.close()

    try:
        assert asyncio.run(ask(None, text=False)).vocabulary == ()
        assert asyncio.run(ask(320, text=False)).vocabulary == tuple(range(20, 320))
        assert asyncio.run(ask(320, text=True)).vocabulary == ()
    finally:
        fake.close()


def test_an_unknown_model_is_refused_with_the_known_ones(fake: FakeServer) -> None:
    with pytest.raises(ServerError, match="has no model 'other'; it lists: m"):
        asyncio.run(learn(Client(Endpoint.parse(fake.url), RealClock()), model="other"))


def command(*arguments: str) -> int:
    return fail_with(lambda: app([*arguments], standalone_mode=False))


def test_the_command_replays_a_file(fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0,400,40\n0.01,4000,80\n0.02,80,8\n")
    out, records = tmp_path / "out.json", tmp_path / "records.jsonl"
    code = command(
        *("replay", str(path), "--url", fake.url, "--length-scale", "8", "--time-scale", "2"),
        *("--ttft-target", "5", "--tbt-target", "5", "--json", str(out), "--records", str(records)),
    )
    shown = capsys.readouterr().out
    assert code == 0, shown
    assert "prompt and output lengths divided by 8" in shown
    assert "arrival times multiplied by 2" in shown
    assert "cut to the server's context of 64 tokens" in shown
    document = json.loads(out.read_text())
    assert (document["offered"], document["completed"], document["failed"]) == (3, 3, 0)
    assert (document["within_targets"], document["apdex"]) == (3, 1.0)
    assert document["scaling"]["length_scale"] == 8
    assert [len(json.loads(line)["token_times_s"]) for line in records.read_text().splitlines()] == [5, 10, 1]


def test_records_can_go_to_standard_output(
    fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0,8,2\n0.01,8,2\n")
    assert command("replay", str(path), "--url", fake.url, "--records", "-") == 0
    out, err = capsys.readouterr()
    assert [json.loads(line)["prompt_tokens"] for line in out.splitlines()] == [8, 8]
    assert "2 requests over" in err


def test_the_command_fails_in_one_line(fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.csv"
    broken.write_text("arrival_s,prompt_tokens,output_tokens\n0,1,1\n1,x,1\n")
    good = tmp_path / "good.csv"
    good.write_text("arrival_s,prompt_tokens,output_tokens\n0,1,1\n")
    fake.behaviour = "busy"
    for code, words, arguments in (
        (1, "broken.csv:3: expected a number of tokens in 'prompt_tokens', got 'x'", [str(broken)]),
        (2, "no such file, nor a built-in workload (chat-steady", ["nothing.csv"]),
        (2, "length_scale must be a number > 0", [str(good), "--length-scale", "0"]),
        (2, "not the address of a server", [str(good), "--url", "ftp://x"]),
        (2, "--timeout must be > 0", [str(good), "--timeout", "-1"]),
        (2, "expected 'Name: value'", [str(good), "--header", "nonsense"]),
        (2, "name a trace file", []),
        (2, "--seed", [str(good), "--seed", "-1"]),
        (2, "--vocab", [str(good), "--vocab", "999999999999"]),
        (2, "nowhere/x.json: cannot be written", [str(good), "--json", str(tmp_path / "nowhere" / "x.json")]),
        (2, "cannot be written", [str(good), "--records", str(tmp_path)]),
        (1, "no OpenAI-compatible server answers at http://127.0.0.1:9", [str(good), "--url", "http://127.0.0.1:9"]),
        (1, "no request completed; the first failure: queue is full", [str(good), "--url", fake.url]),
    ):
        assert command("replay", *arguments) == code
        errors = capsys.readouterr().err.splitlines()
        assert len(errors) == 1
        assert words in errors[0]


def test_the_catalogue_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("replay", "--list") == 0
    assert "chat-bursty" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_gives_the_summary_so_far(fake: FakeServer, tmp_path: Path, number: signal.Signals) -> None:
    fake.behaviour = "stall"
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0,1,2\n100,1,2\n")
    arguments = ["-c", "from autotune.cli import main; main()", "replay", str(path), "--url", fake.url, "--json", "-"]
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert fake.streaming.wait(60)
    os.kill(process.pid, number)
    out, _ = process.communicate(timeout=60)
    document = json.loads(out)
    assert process.returncode == 128 + number
    assert (document["offered"], document["cancelled"], document["failed"], document["partial"]) == (1, 1, 0, True)
