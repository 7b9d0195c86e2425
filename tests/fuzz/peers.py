"""Every server that the product asks something, and what the product does with its answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from unittest import mock

import yaml
from canned import Canned, answer, kind_of, ok
from daemon_rig import FakeEngine, Rig
from hypothesis import strategies as st
from mangle import as_json, bitten, mangled, mangled_page, one_line_each
from reader import verb

from autotune.adapters import llamacpp
from autotune.adapters.desk import KEY
from autotune.adapters.find import adapter_of
from autotune.adapters.process import Process
from autotune.adapters.report import document, lines
from autotune.adapters.watching import Watch
from autotune.adapters.wire import rules_of, watched_engine
from autotune.config import Config, parse_config
from autotune.doctor.service import ask_daemon, ask_engine
from autotune.proxy.app import RecordingProxy, upstream_client
from autotune.replay.client import Client
from autotune.replay.handshake import ServerError, learn
from autotune.replay.records import RequestRecord
from autotune.replay.wire import Endpoint
from engine.clock import ManualClock, RealClock
from engine.control_client import ControlClient, EngineUnreachable
from engine.recording import TrafficRecorder
from envs.signals import Targets
from envs.workload.loaders import load_trace
from envs.workload.trace import Trace, TraceError

Documents = Mapping[str, Any]
_PAGES: Final = Path(__file__).parents[1] / "autotune" / "adapters" / "pages"
_TURNS: Final = 3


@dataclass(frozen=True)
class Peer:
    """``documents``: good answers by path, bytes as they are and everything else as JSON. ``ask`` is given the server,
    and a folder with its socket ``s`` if it is ``unix``; it raises for what must not be.
    """

    name: str
    documents: Callable[[], Documents]
    ask: Callable[[Canned, Path], object]
    unix: bool = False
    examples: int = 30
    page: Callable[[str], st.SearchStrategy[bytes]] = field(default=lambda text: bitten(text.encode()))

    def bad(self, good: Documents) -> st.SearchStrategy[tuple[str, bytes]]:
        """A path, and all that is sent for it."""
        return st.one_of(*(self._bad_one(path, found) for path, found in good.items()))

    def _bad_one(self, path: str, found: Any) -> st.SearchStrategy[tuple[str, bytes]]:
        kind = kind_of(found) if isinstance(found, bytes) else "application/json"
        if isinstance(found, bytes):
            bodies, whole = st.one_of(self.page(found.decode()), bitten(found)), ok(found)
        else:
            bodies, whole = mangled(found).map(as_json), ok(json.dumps(found).encode())
        statuses = st.sampled_from([200, 200, 200, 200, 204, 304, 404, 500])
        answers = st.builds(answer, statuses, bodies, st.just(kind))
        return st.one_of(answers, answers, answers, bitten(whole)).map(lambda sent: (path, sent))


def turned(rig: Rig) -> None:
    """Its loop goes on, tick by tick, and none of them fails."""
    rig.run_s(_TURNS)
    assert rig.loop.ticks >= _TURNS
    assert rig.metric("autotune_tick_errors_total") == 0, rig.ticks()[-1].body.get("reason")


# -- engines of other makes ------------------------------------------------------------------------------------------


def _beside(kind: str) -> Callable[[Canned, Path], None]:
    """A daemon beside the engine, and the verb that only watches it."""

    def ask(server: Canned, folder: Path) -> None:
        clock = ManualClock(start_ns=5_000_000_000)
        text = yaml.safe_dump({"engine": {"kind": kind, "url": server.url, "timeout_s": 5}})
        rig = Rig(folder, text, engine=watched_engine(parse_config(text), clock), clock=clock)
        try:
            with _as_if_local():
                turned(rig)
                _watch(kind, server)
        finally:
            rig.close()

    return ask


def _watch(kind: str, server: Canned) -> None:
    clock, config = ManualClock(start_ns=5_000_000_000), Config()
    adapter = adapter_of(kind, server.url, clock, timeout_s=5)
    with contextlib.suppress(EngineUnreachable, ValueError):  # ValueError: an engine of ours
        adapter_of("auto", server.url, clock, timeout_s=5)
    watch = Watch(Targets(1.0, 0.1, 0.95), short_s=30, long_s=300)
    try:
        for _ in range(_TURNS):
            watch.take(adapter.read())
            clock.advance_s(1)
        who = str(adapter.identity())
    except EngineUnreachable as error:
        one_line_each([str(error)])
        return
    found = document(watch, adapter, who, adapter.url, rules_of(config).terms, 0)
    json.dumps(found)
    assert list(lines(found))


def _as_if_local() -> Any:
    """llama.cpp's command line is looked up where it runs; here nothing of it does."""
    return mock.patch.object(llamacpp, "listener", return_value=Process(1, ("llama-server", "-np", "4"), {}))


def _page(name: str, **told: Any) -> Callable[[], Documents]:
    return lambda: {"/metrics": (_PAGES / name).read_bytes(), **told}


def _desk(server: Canned, folder: Path) -> None:
    """What the journal kept of a restart may be anything: the server's one answer stands for it."""
    kept = server.reply("GET", "/kept", b"").partition(b"\r\n\r\n")[2].decode("utf-8", "replace")
    page = ok((_PAGES / "vllm_0.32_cpu.prom").read_bytes())
    with Canned() as engine:
        engine.reply = lambda _method, path, _body: page if path == "/metrics" else answer(404, b"{}")
        clock = ManualClock(start_ns=5_000_000_000)
        restart = {"allowed": True, "file": str(folder / "engine.env"), "commands": [["true"]]}
        text = yaml.safe_dump({"engine": {"kind": "vllm", "url": engine.url, "timeout_s": 5}, "restart": restart})
        rig = Rig(folder, text, engine=watched_engine(parse_config(text), clock), clock=clock)
        try:
            rig.parts.journal.remember(KEY, None)
            with rig.parts.journal._lock:
                rig.parts.journal._connection.execute("UPDATE memory SET value = ? WHERE key = ?", (kept, KEY))
            rig.daemon.restore()
            turned(rig)
        finally:
            rig.close()


_KEPT: Final = {
    "/kept": {
        "tried_wall_s": 1.0, "took_s": 20.0, "barred": {"kv-cache-dtype=fp8": 1e9},
        "work": {
            "tick": 3, "changes": [["kv-cache-dtype", "fp8"]], "before": {"kv-cache-dtype": "auto"},
            "phase": "restarting", "since_ns": 5, "file_before": None, "is_paused": False, "stopped_ns": 6, "held": 0.0,
            "up_ns": None, "why": "",
        },
    }
}  # fmt: skip


# -- our own engine and daemon ---------------------------------------------------------------------------------------


def _engine() -> Documents:
    clock = ManualClock(start_ns=5_000_000_000)
    engine = FakeEngine(clock)
    engine.serve_requests(5)
    return {
        "/v1/stats": engine.stats().to_json(),
        "/v1/tunables": engine.tunables(),
        "/v1/about": {"version": "0.1", "torch": "2", "device": "cpu"},
        "/v1/pins": {"pins": [], "bytes": 0, "max_bytes": 1 << 20},
        "/v1/audit": {"problem": None, "took_s": 0.1},
    }


def _own_engine(_server: Canned, folder: Path) -> None:
    control = folder / "s"
    with ControlClient(control, timeout_s=5) as client:
        rig = Rig(folder, "", engine=client)
        try:
            turned(rig)
        finally:
            rig.close()
    for words in (
        ["status"], ["status", "--json"], ["tunables"], ["pins"], ["unpin", "--all"], ["audit"], ["release"],
        ["set", "kv_format=int8"], ["pin", "kv_format=int8", "--for", "2h"],
    ):  # fmt: skip
        verb(*words, "--control", str(control), *(["--admin", "http://127.0.0.1:9"] if words[0] == "status" else []))
    with contextlib.suppress(EngineUnreachable):
        ask_engine(control)


def _daemon() -> Documents:
    with tempfile.TemporaryDirectory() as place:
        rig = Rig(Path(place))
        rig.engine.serve_requests(5)
        rig.run_s(3)
        status = json.loads(json.dumps(dict(rig.daemon.status()), default=str))
        rig.close()
    told = {"answer": "done", "needs_restart": [], "error": "no"}
    return {"/status": status, "/control/mode": told, "/control/reload": told}


def _own_daemon(server: Canned, folder: Path) -> None:
    token = folder / "token"
    token.write_text("0123456789abcdef")
    for words in (["status"], ["status", "--json"]):
        verb(*words, "--admin", server.url, "--control", str(folder / "none"))
    for words in (["mode", "advise"], ["reload"]):
        verb(*words, "--admin", server.url, "--token-file", str(token))
    ask_daemon(server.url)


# -- Prometheus ------------------------------------------------------------------------------------------------------

_NOW_S: Final = 1_800_000_000.0
_TARGET: Final = {"job": "autotune", "instance": "a:9466", "pod": "a-0", "namespace": "llm"}


def _prometheus() -> Documents:
    gauges = {"autotune_load": 0.5, "autotune_num_requests_running": 3.0, "vllm:num_requests_running": 2.0}
    labelled = {
        "autotune_mode": {"mode": "active"}, "autotune_engine_health": {"state": "ok"},
        "autotune_policy": {"policy": "rules"}, "autotune_override": {"knob": "kv_format"},
        "autotune_tunable": {"knob": "kv_format", "value": "int8"}, "autotune_kv_resident_bytes": {"kv_format": "int8"},
        "autotune_window_ttft_seconds": {"percentile": "95"}, "autotune_target_seconds": {"metric": "ttft"},
    }  # fmt: skip
    rows = [_row(name, {}, value) for name, value in gauges.items()]
    rows += [_row(name, labels, 1.0) for name, labels in labelled.items()]
    counter = {"metric": {"__name__": "autotune_decisions_total", "verdict": "applied", "knob": "kv_format", **_TARGET},
               "values": [[_NOW_S - 60 * n, str(9 - n)] for n in range(5, 0, -1)]}  # fmt: skip
    return {
        "time": _told("scalar", [_NOW_S, str(_NOW_S)]),
        "names": _told("vector", rows),
        "up": _told("vector", [_row("up", {}, 1.0)]),
        "lately": _told("vector", [_row("autotune_ticks_total", {}, 5.0)]),
        "decisions": _told("matrix", [counter]),
    }


def _row(name: str, labels: Mapping[str, str], value: float) -> dict[str, Any]:
    return {"metric": {"__name__": name, **labels, **_TARGET}, "value": [_NOW_S, str(value)]}


def _told(kind: str, result: Any) -> dict[str, Any]:
    return {"status": "success", "data": {"resultType": kind, "result": result}}


def _fleet(server: Canned, _folder: Path) -> None:
    told = server.reply

    def by_query(method: str, _path: str, body: bytes) -> bytes:
        kinds = {b"time": "time", b"up": "up", b"last_over_time": "lately", b"s%5D": "decisions"}
        kind = next((kind for word, kind in kinds.items() if b"query=" + word in body or body.endswith(word)), "names")
        return told(method, kind, body)

    server.reply = by_query
    for more in ([], ["--json"]):
        verb("fleet", "--prometheus", server.url, *more)


# -- servers of others that are replayed to, or recorded in front of -------------------------------------------------


def _completion(text: str = "a") -> dict[str, Any]:
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
    choice = {"index": 0, "text": text, "finish_reason": "length", "token_ids": [5, 6]}
    return {"id": "x", "choices": [choice], "usage": usage}


def _stream() -> bytes:
    first = {"choices": [{"index": 0, "text": "a", "token_ids": [5], "finish_reason": None}], "usage": None}
    events = (b"data: " + json.dumps(event).encode() + b"\n\n" for event in (first, _completion()))
    return b"".join(events) + b"data: [DONE]\n\n"


def _server() -> Documents:
    models = {"data": [{"id": "m", "max_model_len": 256, "vocab_size": 300}]}
    return {
        "/v1/models": models,
        "/tokenize": {"tokens": list(range(40))},
        "/v1/completions": _completion(),
        "stream": _stream(),
    }


def _streams(server: Canned) -> None:
    """The one path that answers in two ways."""
    told = server.reply

    def by_body(method: str, path: str, body: bytes) -> bytes:
        return told(method, "stream" if b'"stream":true' in body.replace(b" ", b"") else path.partition("?")[0], body)

    server.reply = by_body


def _replay(server: Canned, _folder: Path) -> None:
    _streams(server)
    asyncio.run(_replay_one(server.url))


async def _replay_one(url: str) -> None:
    client = Client(Endpoint.parse(url), RealClock(), timeout_s=5)
    asyncio.get_running_loop().set_exception_handler(_raise)
    try:
        for text in (False, True):
            with contextlib.suppress(ServerError):
                server = await learn(client, model=None, text=text)
                server.prompts(Trace("a", ()), 1)
        record = RequestRecord(0, 0.0, 9, 2)
        await client.stream(record, b'{"stream": true}', exact_tokens=False)
        assert len(record.token_times_s) <= 1 << 24
    finally:
        client.close()


def _raise(_loop: object, context: Mapping[str, Any]) -> None:
    raise AssertionError(context.get("message"), context.get("exception"))


def _proxy(server: Canned, folder: Path) -> None:
    """The body of the request is the answer to ``asked``: a hostile client before a hostile server."""
    told = server.reply
    asked = told("POST", "asked", b"").partition(b"\r\n\r\n")[2]
    _streams(server)
    path = folder / "traffic.csv"
    for earlier in folder.glob("traffic.csv*"):
        earlier.unlink()
    recorder = TrafficRecorder(path, RealClock(), of_text=True)
    for at in ("/v1/completions", "/v1/chat/completions"):
        sent = asyncio.run(_proxied(server.url, recorder, at, asked))
        assert [message["type"] for message in sent[:1]] == ["http.response.start"], "nothing was answered"
    recorder.close()
    assert recorder.dropped == 0
    try:
        load_trace(path)
    except TraceError as error:
        if "no requests" not in str(error):
            raise


async def _proxied(url: str, recorder: TrafficRecorder, path: str, body: bytes) -> Sequence[Mapping[str, Any]]:
    sent: list[Mapping[str, Any]] = []
    first = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Mapping[str, Any]:
        message = next(first, None)
        if message is None:
            await asyncio.Event().wait()
        return message or {}

    async def send(message: Mapping[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
             "headers": [(b"content-type", b"application/json")]}  # fmt: skip
    async with upstream_client() as client:
        app = RecordingProxy(Endpoint.parse(url), client, recorder, RealClock())
        await app(scope, receive, send)  # type: ignore[arg-type]  # plain mappings
    return sent


def _asked() -> Documents:
    chat = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}], "tool_calls": [{"id": "a"}]}],
        "tools": [{"type": "function"}], "prompt": [[1, 2], "a"], "n": 2, "stream": True,
    }  # fmt: skip
    return {"asked": chat, "stream": _stream(), "/v1/completions": _completion(), "/v1/chat/completions": _completion()}


def _all() -> Iterator[Peer]:
    vllm = {"/version": {"version": "0.32"}}
    for name in ("vllm_0.32_cpu.prom", "vllm_0.6_old_names.prom", "vllm_two_engines.prom"):
        yield Peer(name, _page(name, **vllm), _beside("vllm"), page=mangled_page)
    info = {"kv_cache_dtype": "auto", "page_size": 1, "served_model_name": "m", "max_running_requests": 8,
            "context_length": 4096, "max_total_num_tokens": 10_000, "version": "0.5"}  # fmt: skip
    yield Peer("sglang", _page("sglang_0.5.prom", **{"/server_info": info}), _beside("sglang"), page=mangled_page)
    props = {"total_slots": 4, "default_generation_settings": {"n_ctx": 2048}, "model_path": "/m/a.gguf",
             "build_info": "b1"}  # fmt: skip
    yield Peer("llama.cpp", _page("llamacpp_b11434.prom", **{"/props": props}), _beside("llamacpp"), page=mangled_page)
    yield Peer("a restart under way", lambda: _KEPT, _desk)
    yield Peer("our engine", _engine, _own_engine, unix=True)
    yield Peer("our daemon", _daemon, _own_daemon)
    yield Peer("Prometheus", _prometheus, _fleet)
    yield Peer("a server that is replayed to", _server, _replay)
    yield Peer("a server behind the recording proxy", _asked, _proxy)


PEERS: Final = tuple(_all())
