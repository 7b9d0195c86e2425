"""A person's own changes over the admin port."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from waiting import until

from autotune.admin_token import read_token


@pytest.fixture
def served(make_rig: Any) -> Iterator[Any]:
    rig = make_rig("admin: {port: 0}\n")
    rig.daemon.admin.start()
    rig.run_s(2)
    yield rig
    rig.daemon.admin.stop()


def while_turning(rig: Any, ask: Callable[[], Any]) -> Any:
    """What ``ask`` returns in a thread of its own, while the loop turns."""
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(ask()))
    thread.start()

    def done() -> bool:
        rig.loop.turn()
        return not thread.is_alive()

    until(done, "the answer")
    return answers[0]


def order(rig: Any, name: str, **body: Any) -> tuple[int, str]:
    headers = {"authorization": f"Bearer {read_token(rig.folder / 'admin.token')}"}
    address = f"{rig.daemon.admin.address}/control/{name}"

    def ask() -> tuple[int, str]:
        request = urllib.request.Request(address, json.dumps(body).encode(), headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, json.load(answer)["answer"]
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)["error"]

    return while_turning(rig, ask)


def test_a_knob_is_set_told_and_given_back(served: Any) -> None:
    status, line = order(served, "set", knob="kv_format", value="int8", reason="incident 7", who="anna")
    assert (status, line) == (200, "kv_format=int8: applied; left alone until it is given back")
    writer = served.engine.state.writers["kv_format"]
    assert (writer.writer, writer.reason) == ("operator:anna", "incident 7")
    served.run_s(2)
    (told,) = [one for one in served.parts.decisions.recent(5) if one.scenario == "override"]
    assert (told.knob, told.old, told.new, told.scenario, told.writer) == (
        "kv_format", "native", "int8", "override", "operator:anna",
    )  # fmt: skip
    assert "kv_format" in served.daemon.status()["overrides"]
    assert order(served, "release", knob="kv_format") == (200, "given back to the daemon: kv_format")
    served.run_s(2)
    assert served.daemon.status()["overrides"] == {}
    assert served.engine.state.desired["kv_format"] == "int8", "the value stays until the daemon moves it"
    assert order(served, "release")[1] == "nothing to give back: the daemon may move every knob"
    assert order(served, "release", knob="kv_format")[1] == "nothing to give back: kv_format is the daemon's already"


def test_all_knobs_are_given_back_at_once(served: Any) -> None:
    for knob, value in (("kv_format", "int8"), ("block_size", 64)):
        order(served, "set", knob=knob, value=value)
    assert order(served, "release") == (200, "given back to the daemon: kv_format, block_size")


def test_for_a_while_only(served: Any) -> None:
    status, line = order(served, "set", knob="block_size", value="64", for_s=900)
    assert (status, line) == (200, "block_size=64: applied; left alone for 15 min")
    served.run_s(2)
    assert "until" in served.daemon.status()["overrides"]["block_size"]
    served.clock.advance_s(901)
    served.run_s(2)
    assert served.daemon.status()["overrides"] == {}


@pytest.mark.parametrize("mode", ["advise", "off"])
def test_the_mode_gates_the_daemon_and_not_people(served: Any, mode: str) -> None:
    order(served, "mode", mode=mode)
    assert order(served, "set", knob="kv_format", value="int8")[0] == 200
    assert served.engine.state.desired["kv_format"] == "int8"


@pytest.mark.parametrize(
    ("name", "body", "told"),
    [
        ("set", {}, "knob, value missing"),
        ("set", {"knob": "kv_format"}, "value missing"),
        ("set", {"knob": "kv_format", "value": "int2"}, "choose one of native"),
        ("set", {"knob": "kv_format", "value": ["int8"]}, "choose one of native"),
        ("set", {"knob": "colour", "value": 1}, "unknown tunable"),
        ("set", {"knob": ["kv_format"], "value": "int8"}, "unknown tunable"),
        ("set", {"knob": "kv_format", "value": "int8", "force": True}, "unknown: 'force'"),
        ("set", {"knob": "kv_format", "value": "int8", "for_s": 0}, "for_s"),
        ("set", {"knob": "kv_format", "value": "int8", "for_s": 1e9}, "for_s"),
        ("set", {"knob": "kv_format", "value": "int8", "for_s": True}, "for_s"),
        ("set", {"knob": "kv_format", "value": "int8", "for_s": "900"}, "for_s"),
        ("set", {"knob": "kv_format", "value": "int8", "reason": "x" * 201}, "reason"),
        ("set", {"knob": "kv_format", "value": "int8", "reason": 7}, "reason"),
        ("set", {"knob": "kv_format", "value": "int8", "who": "a;until=999999999"}, "who"),
        ("set", {"knob": "kv_format", "value": "int8", "who": ""}, "who"),
        ("release", {"knob": "colour"}, "unknown tunable"),
        ("release", {"knob": ["kv_format"]}, "unknown tunable"),
        ("release", {"all": True}, "unknown: 'all'"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(served: Any, name: str, body: dict[str, Any], told: str) -> None:
    status, line = order(served, name, **body)
    assert status == 400
    assert told in line
    assert "\n" not in line
    assert served.engine.state.revision == 0


def test_a_refusal_of_the_engine_is_told(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    veto = {"revision": 0, "results": {"kv_format": {"status": "rejected", "why": "costs 3 %,\nbudget 0.5 %"}}}
    monkeypatch.setattr(served.engine, "patch", lambda *_a, **_k: veto)
    assert order(served, "set", knob="kv_format", value="int4") == (
        400,
        "kv_format=int4: rejected, costs 3 %, budget 0.5 %",
    )


def test_without_an_engine_it_says_so(served: Any) -> None:
    served.engine.alive = False
    for name, body in (("set", {"knob": "kv_format", "value": "int8"}), ("release", {})):
        status, line = order(served, name, **body)
        assert status == 503
        assert "no engine listens" in line
