"""The benchmark's client counts what servers send, however it is cut, and says so when they fail."""

from __future__ import annotations

import asyncio
import json

import pytest

from engine.bench.client import Target, ask, closed_loop, prompts

EVENT = b'data: {"choices":[{"text":"x"}],"usage":null}\n\n'


class Server:
    """Answers each request with so many events, in pieces of ``cut`` bytes."""

    def __init__(self, *, cut: int, status: bytes = b"200 OK", usage: bool = True) -> None:
        self.bodies: list[dict[str, object]] = []
        self.at_once = self.most = 0
        self._cut, self._status, self._usage = cut, status, usage

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        self.bodies.append(body)
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        answer = b"HTTP/1.1 " + self._status + b"\r\n\r\n" + EVENT * body["max_tokens"]
        if self._usage:
            answer += b'data: {"choices":[],"usage":{"completion_tokens":%d}}\n\ndata: [DONE]\n\n' % body["max_tokens"]
        for start in range(0, len(answer), self._cut):
            writer.write(answer[start : start + self._cut])
            await writer.drain()
            await asyncio.sleep(0)
        self.at_once -= 1
        writer.close()


async def with_server(server: Server, concurrency: int, number: int) -> float:
    async with await asyncio.start_server(server, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        target = Target("127.0.0.1", port, "m", (("seed", 3),))
        if number == 1:
            return (await ask(target, [1, 2], 5)).tokens
        return (await closed_loop(target, concurrency, prompts(number, 4, 100, 0), 5)).tokens


@pytest.mark.parametrize("cut", [1, 7, 100_000])
def test_tokens_are_counted_however_the_stream_is_cut(cut: int) -> None:
    server = Server(cut=cut)
    assert asyncio.run(with_server(server, 1, 1)) == 5
    assert server.bodies[0]["seed"] == 3
    assert server.bodies[0]["ignore_eos"] is True


def test_a_loop_never_has_more_requests_than_asked_for() -> None:
    server = Server(cut=20)
    assert asyncio.run(with_server(server, 3, 8)) == 40
    assert server.most == 3
    assert len({json.dumps(body["prompt"]) for body in server.bodies}) == 8


@pytest.mark.parametrize("server", [Server(cut=50, status=b"503 No"), Server(cut=50, usage=False)])
def test_failures_are_errors(server: Server) -> None:
    with pytest.raises(RuntimeError, match="no answer"):
        asyncio.run(with_server(server, 1, 1))
