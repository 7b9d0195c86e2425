"""``autotune advise``: one command beside a running server, which only reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.cli import advise as verb
from engine import clock as clocks

PROFILE = Path(__file__).parents[3] / "envs/profiles/llama3_8b_l4_estimated.yaml"


@pytest.fixture(autouse=True)
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute of watching takes no time: whoever would sleep moves the clock."""
    clock = clocks.ManualClock(start_ns=10**9)
    monkeypatch.setattr(clocks, "RealClock", lambda: clock)
    monkeypatch.setattr(verb, "time", SimpleNamespace(sleep=clock.advance_s))


def press(server: Any) -> None:
    """From now on memory is full at every reading, and requests wait, are late and are preempted."""

    def before_page() -> None:
        for one in server.engines.values():
            one.running, one.waiting, one.usage = 10, 5, 1.0
            one.preemptions += 1
            one.serve(1, ttft_s=3.0)

    server.before_page = before_page


@pytest.fixture
def vllm(fake_engines: Any) -> Iterator[Any]:
    with fake_engines.FakeServer("vllm", {"kv-cache-dtype": "auto", "block-size": 16}) as server:
        yield server


def test_it_says_what_what_it_would_have_saved_and_what_a_restart_costs(autotune: Any, vllm: Any) -> None:
    press(vllm)
    code, out, err = autotune("advise", "--url", vllm.url)
    assert code == 0, err
    assert "vllm 0.32.0 (tiny)" in out
    assert "advice: restart with kv-cache-dtype=fp8" in out
    assert "AUTOTUNE_ENGINE_ARGS=--kv-cache-dtype fp8" in out
    lines = out.splitlines()
    saved = [line for line in lines if "would have saved" in line]
    assert len(saved) == 1
    assert saved[0].startswith("estimated:")
    assert "a restart costs 60 s without service (estimated)" in saved[0]
    assert "preemptions" in saved[0]
    assert any(line.startswith("measured: TTFT p95") for line in lines)
    assert lines[-1] == "nothing was changed and nothing restarted"
    assert vllm.posts == []
    assert vllm.knobs["kv-cache-dtype"] == "auto"


def test_as_json_with_a_profile_it_simulates_as_well(autotune: Any, vllm: Any) -> None:
    press(vllm)
    code, out, err = autotune("advise", "--url", vllm.url, "--profile", str(PROFILE), "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["engine"]["knobs"] == {"kv-cache-dtype": "auto", "block-size": 16}
    assert found["advice"]["changes"] == [["kv-cache-dtype", "fp8"]]
    assert found["engines"]["0"]["measured"]["preemptions"] > 10
    assert found["restarted"] is False
    played = found["simulated"]
    assert set(played) == {"draws", "as_it_was", "as_advised"}
    assert played["as_it_was"]["loss_per_token"] == 0 < played["as_advised"]["loss_per_token"]


def test_a_calm_server_is_left_as_it_is(autotune: Any, vllm: Any) -> None:
    code, out, _ = autotune("advise", "--url", f"{vllm.url}/metrics")
    assert code == 0
    assert "advice: leave it as it is (steady)" in out
    assert "restart with" not in out


def test_engines_on_one_page_are_shown_apart(autotune: Any, fake_engines: Any) -> None:
    knobs = {"kv-cache-dtype": "auto", "block-size": 16}
    with fake_engines.FakeServer("vllm", knobs, engines=("0", "1")) as server:
        press(server)
        code, out, _ = autotune("advise", "--url", server.url)
    assert code == 0
    assert sum(line.startswith("engine 1: measured") for line in out.splitlines()) == 2


def test_what_llamacpp_does_not_tell_is_called_unknown(autotune: Any, fake_engines: Any) -> None:
    with fake_engines.FakeServer("llamacpp", {"parallel": 4}) as server:
        press(server)
        code, out, _ = autotune("advise", "--url", server.url, "--engine", "llamacpp")
    assert code == 0
    assert "TTFT p95 unknown s" in out
    assert "unknown preemptions" in out
    assert "unknown req/s" in out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--url", "nowhere"), "must be an address"),
        (("--url", "http://127.0.0.1:9"), "no engine answers"),
        (("--url", "http://127.0.0.1:9", "--engine", "tgi"), "is no engine"),
        (("--url", "http://127.0.0.1:9", "--duration", "2", "--every", "1"), "too few readings"),
    ],
)
def test_what_cannot_be_watched_is_one_line(autotune: Any, arguments: tuple[str, ...], problem: str) -> None:
    code, _, err = autotune("advise", *arguments)
    assert code
    assert problem in err
    assert len(err.splitlines()) == 1


def test_a_page_that_is_not_of_the_engine_named_is_said(autotune: Any, vllm: Any) -> None:
    code, _, err = autotune("advise", "--url", vllm.url, "--engine", "sglang")
    assert code == 1
    assert "has no figure of sglang" in err
