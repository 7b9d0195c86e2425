"""The fuzzer's well-formed orders are carried out: what is refused at the door tries nothing behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import descriptions
from daemon_rig import Rig

from autotune.overrides import override_actions
from engine.tunables import TUNABLES


def test_orders_as_described_are_carried_out(tmp_path: Path) -> None:
    operation: dict[str, Any] = descriptions.orders()["paths"]["/control/set"]["post"]
    kinds = operation["requestBody"]["content"]["application/json"]["schema"]["anyOf"]
    rig = Rig(tmp_path)
    try:
        actions = override_actions(rig.parts)
        for kind in kinds:
            knob = kind["properties"]["knob"]["const"]
            for value in kind["properties"]["value"]["enum"]:
                wanted = {"knob": knob, "value": value, "for_s": kind["properties"]["for_s"]["maximum"], "who": "a@b"}
                assert f"{knob}={value}" in actions["set"](wanted)["answer"]
            assert actions["release"]({"knob": knob})["answer"] == f"given back to the daemon: {knob}"
    finally:
        rig.close()
    assert [kind["properties"]["knob"]["const"] for kind in kinds] == list(TUNABLES)
