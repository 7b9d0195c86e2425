"""Engines of other makes: pages of theirs that were recorded, and the daemon and the verb that watch one."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final
from unittest import mock

import yaml
from canned import Canned, answer, ok
from daemon_rig import Rig
from mangle import mangled_page, one_line_each
from peer import TURNS, Documents, Peer, turned

from autotune.adapters import llamacpp
from autotune.adapters.desk import KEY
from autotune.adapters.find import adapter_of
from autotune.adapters.process import Process
from autotune.adapters.report import document, lines
from autotune.adapters.watching import Watch
from autotune.adapters.wire import rules_of, watched_engine
from autotune.config import Config, parse_config
from engine.clock import ManualClock
from engine.control_client import EngineUnreachable
from envs.signals import Targets

_PAGES: Final = Path(__file__).parents[1] / "autotune" / "adapters" / "pages"


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
        for _ in range(TURNS):
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


def engines() -> Iterator[Peer]:
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
