"""A server's settings off its command line: found by the port that it listens on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from autotune.adapters import llamacpp
from autotune.adapters.find import adapter_of
from autotune.adapters.process import Process, listener, value_of
from engine.clock import ManualClock

CTK = ("-ctk", "--cache-type-k")


def proc_of(folder: Path, arguments: list[str], environment: dict[str, str] | None) -> Path:
    """A /proc with one process, 42, that listens on port 8080 (1F90)."""
    (folder / "net").mkdir(parents=True)
    rest = "00000000:00000000 00:00000000 00000000  1000        0"
    row = f"   0: 0100007F:1F90 00000000:0000 0A {rest} 777 1 0 100 0 0 10 0"
    other = f"   1: 0100007F:1F90 0100007F:1000 01 {rest} 778 1 0 100 0 0 10 0"
    (folder / "net" / "tcp").write_text(f"  sl  local_address rem_address   st\n{other}\n{row}\n")
    for pid, inode in ((41, 778), (42, 777)):
        (folder / str(pid) / "fd").mkdir(parents=True)
        (folder / str(pid) / "fd" / "3").symlink_to(f"socket:[{inode}]")
    (folder / "42" / "cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in arguments))
    if environment is not None:
        text = b"".join(f"{name}={value}\0".encode() for name, value in environment.items())
        (folder / "42" / "environ").write_bytes(text)
    return folder


def test_the_listener_is_found_and_nobody_else(tmp_path: Path) -> None:
    proc = proc_of(tmp_path, ["llama-server", "-ctk", "q8_0"], {"A": "b=c"})
    found = listener(8080, proc)
    assert found == Process(42, ("llama-server", "-ctk", "q8_0"), {"A": "b=c"})
    assert listener(8081, proc) is None
    assert listener(8080, tmp_path / "none") is None


@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [
        (["s"], {}, "f16"),
        (["s"], {"LLAMA_ARG_CACHE_TYPE_K": "q4_0"}, "q4_0"),
        (["s", "-ctk", "q8_0"], {"LLAMA_ARG_CACHE_TYPE_K": "q4_0"}, "q8_0"),
        (["s", "-ctk", "q8_0", "--cache-type-k", "q4_0"], {}, "q4_0"),
        (["s", "--cache-type-k", "q4_0"], None, "q4_0"),
        (["s"], None, None),
    ],
)
def test_the_last_word_counts_and_what_may_not_be_read_is_unknown(
    arguments: list[str], environment: dict[str, str] | None, expected: str | None
) -> None:
    found = Process(1, tuple(arguments), environment)
    assert value_of(found, CTK, "LLAMA_ARG_CACHE_TYPE_K", "f16") == expected


def test_this_process_is_found_by_its_port(fake_engines: Any) -> None:
    with fake_engines.FakeServer("llamacpp", {"parallel": 4}) as server:
        found = listener(int(server.url.rpartition(":")[2]))
    assert found is not None
    assert found.pid == os.getpid()


@pytest.mark.parametrize(
    ("arguments", "slots"),
    [
        (["s", "-np", "4"], 4),
        (["s", "--parallel", "4", "-ctk", "q8_0"], 4),
        (["s"], None),
        (["s", "-np", "4", "--kv-unified"], None),
    ],
)
def test_slots_are_a_knob_only_where_each_has_memory_of_its_own(
    fake_engines: Any, monkeypatch: pytest.MonkeyPatch, arguments: list[str], slots: int | None
) -> None:
    monkeypatch.setattr(llamacpp, "listener", lambda _: Process(1, tuple(arguments), {}))
    with fake_engines.FakeServer("llamacpp", {"parallel": 4}) as server:
        adapter = adapter_of("llamacpp", server.url, ManualClock())
        (reading,) = adapter.read().values()
        assert reading.effective.get("parallel") == slots
        assert reading.effective["cache-type-k"] == ("q8_0" if "-ctk" in arguments else "f16")
        assert adapter.identity().version == "b11434-sdist"
        given = adapter.arguments({"cache-type-k": "q8_0", "parallel": 7})
        assert {flag.variable: value for flag, value in given.items()} == {
            "LLAMA_ARG_CACHE_TYPE_K": "q8_0",
            "LLAMA_ARG_N_PARALLEL": "7",
            "LLAMA_ARG_CTX_SIZE": str(7 * 512),
        }


def test_a_server_that_is_still_loading_is_asked_again(fake_engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llamacpp, "listener", lambda _: None)
    with fake_engines.FakeServer("llamacpp", {"parallel": 4}) as server:
        adapter = adapter_of("llamacpp", server.url, ManualClock())
        told, fake_engines.TOLD["llamacpp"] = fake_engines.TOLD["llamacpp"], lambda _: {}
        try:
            (reading,) = adapter.read().values()
            assert reading.max_num_seqs is None
        finally:
            fake_engines.TOLD["llamacpp"] = told
        (reading,) = adapter.read().values()
        assert reading.max_num_seqs == 4
