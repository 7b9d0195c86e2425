"""The daemon's token is in no log, whoever orders what, with whatever token."""

from __future__ import annotations

import json
import logging
import threading
import urllib.error
import urllib.request
from typing import Any

import pytest
from waiting import until

from autotune.admin_token import read_token
from engine.logs import JsonLines

WRONG = "a-wrong-token-that-somebody-typed"


def test_the_token_is_in_no_log(make_rig: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    rig = make_rig("admin: {port: 0}\n")
    rig.daemon.admin.start()
    rig.run_s(2)
    token = read_token(rig.folder / "admin.token")
    orders = [
        ("mode", b'{"mode": "advise"}', token),
        ("mode", b'{"mode": "loud"}', token),
        ("mode", b"{", token),
        ("reload", b"", token),
        ("release", b"", token),
        ("set", b'{"knob": "kv_format", "value": "int8", "reason": "why"}', token),
        ("set", b'{"knob": "kv_format", "value": "int8"}', WRONG),
        ("nosuch", b"", token),
    ]

    def order() -> None:
        for name, body, given in orders:
            headers = {"authorization": f"Bearer {given}"}
            request = urllib.request.Request(f"{rig.daemon.admin.address}/control/{name}", body, headers, method="POST")
            try:
                urllib.request.urlopen(request, timeout=30).read()
            except urllib.error.HTTPError as error:
                error.read()

    thread = threading.Thread(target=order)
    thread.start()

    def done() -> bool:
        rig.loop.turn()
        return not thread.is_alive()

    until(done, "the orders")
    rig.write_config("nosuch: 1\n")
    rig.daemon.reload()
    rig.run_s(3)
    rig.daemon.admin.stop()
    told = "\n".join(JsonLines().format(record) for record in caplog.records)
    assert "mode advise by order" in told
    assert "kv_format" in told
    assert token not in told
    assert WRONG not in told


def test_records_about_a_decision_name_it(make_rig: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rig = make_rig()
    rig.run_s(2)
    rig.engine.patch({"kv_format": "int8"}, writer="operator:anna", reason="why")
    rig.run_s(2)
    shown = rig.parts.decisions.recent(5)
    assert "override" in {one.scenario for one in shown}
    told = [json.loads(JsonLines().format(record)) for record in caplog.records]
    assert [one["decision"] for one in told if one["logger"] == "autotune.decisions"] == [one.tick for one in shown]
