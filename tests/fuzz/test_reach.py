"""The fuzzers miss nothing: every place that parses, and every route that is served, is reached by one of them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import descriptions
import pytest
from canned import Canned, pages
from daemon_rig import Rig
from journal_readers import READERS as OF_JOURNALS
from model_readers import READERS as OF_MODELS
from peers import PEERS
from reach import Reached, parsing
from readers import READERS

from engine.clock import ManualClock
from engine.server.app import Api
from engine.server.control import control_app

# What is parsed but comes from nobody else. Every other place must be reached.
OWN = {
    "autotune/adapters/process.py::_inodes": "the kernel's",
    "autotune/adapters/process.py::_words": "the kernel's, of a process that may be looked at",
    "autotune/admin_actions.py::_body": "an order's body: schemathesis, with and without the token",
    "autotune/child.py::_message_of": "what a process of ours logs",
    "autotune/cli/compare_formats.py::_measure": "asks the reader of texts, which is reached",
    "autotune/cli/compare_formats.py::_run": "asks the reader of texts, which is reached",
    "autotune/cli/daemon.py::_boot_id": "the kernel's",
    "autotune/cli/orders.py::_refusal": "an error's body: the bad answers of our daemon",
    "autotune/cli/tune_rules.py::tune_rules": "rules that their reader has just taken",
    "autotune/config.py::files_named_in": "of a configuration that was refused: the bad ones that are checked",
    "autotune/dashboard/routes.py::_static": "files of the package",
    "autotune/doctor/probes.py::_read": "the kernel's, for people to read",
    "autotune/doctor/torch_facts.py::ask_torch": "what a process of ours prints",
    "autotune/journal_salvage.py::_open": "a damaged journal: the bad ones",
    "autotune/run_document.py::digest_of": "a sum of bytes",
    "autotune/supervisor.py::_lives": "the kernel's",
    "policies/evaluation/cells.py::_content": "a sum of bytes",
    "policies/export.py::_says_policy": "whether a folder of ours may be replaced",
    "policies/search.py::search": "rules that it has written itself",
    "policies/train/sweep.py::_put": "a value of the command line",
    "envs/simulated.py::SimulatedEngine.restore": "a snapshot that this process has taken",
    "envs/simulator.py::Simulator.restore": "a snapshot that this process has taken",
    "envs/workload/writer.py::_open": "opened to be written",
    "engine/assembly.py::MachineProbe.__call__": "the kernel's",
    "engine/quality/digest.py::model_digest": "a sum of bytes",
    "engine/server/app.py::Api._document": "a request's body: schemathesis",
    "engine/server/control.py::_patch_body": "a request's body: schemathesis",
}


def reached(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """What good files and answers lead to: the bad ones take the same ways in."""
    with Reached() as found:
        for reader in [*READERS, *OF_MODELS, *OF_JOURNALS, *training()]:
            reader.read(reader.make(tmp_path_factory.mktemp("reach")))
        for peer in PEERS:
            folder = tmp_path_factory.mktemp("p")
            with Canned(folder / "s" if peer.unix else None) as server:
                server.reply = pages(peer.documents())
                peer.ask(server, folder)
    return found.functions


def training() -> Iterable[Any]:
    pytest.importorskip("sb3_contrib", reason="the extra 'train' is not installed: its readers cannot be reached")
    from train_readers import READERS as OF_RUNS

    return OF_RUNS


def test_every_place_that_parses_is_reached_by_a_fuzzer(tmp_path_factory: pytest.TempPathFactory) -> None:
    places = parsing()
    entered = reached(tmp_path_factory)
    missed = {name: line for name, line in places.items() if name not in entered and name not in OWN}
    assert not missed, "give it a reader in tests/fuzz, or say in OWN why it needs none"
    assert not set(OWN) - set(places), "no such place any more"
    assert not set(OWN) & entered, "it is reached: take it off OWN"


def test_a_new_reader_is_found(tmp_path: Path) -> None:
    (tmp_path / "autotune").mkdir()
    source = (
        "import json\nclass A:\n    def read(self, path):\n        return json.loads(path.read_text())\n"
        "def write(path):\n    with path.open('w') as file:\n        file.write('x')\n"
        "def look(path):\n    def inner():\n        return open(path).read()\n    return inner\n"
    )
    (tmp_path / "autotune" / "new.py").write_text(source)
    found = parsing(tmp_path)
    assert set(found) == {"autotune/new.py::A.read", "autotune/new.py::look.<locals>.inner"}


def served(routes: Iterable[Any]) -> set[tuple[str, str]]:
    """Methods and paths, without HEAD, which is GET; names in a path without their kind."""
    return {
        (method.lower(), re.sub(r"\{(\w+)(:\w+)?\}", r"{\1}", route.path))
        for route in routes
        for method in route.methods - {"HEAD"}
    }


def described(document: dict[str, Any]) -> set[tuple[str, str]]:
    return {(method, path) for path, methods in document["paths"].items() for method in methods}


def test_every_route_of_the_engine_is_fuzzed() -> None:
    api = Api(cast("Any", None), cast("Any", None), cast("Any", None), ManualClock(), lambda: "")
    assert served(cast("Any", api.app())._app.routes) == described(descriptions.openai())
    assert served(control_app(cast("Any", None)).routes) == described(descriptions.control())


def test_every_route_of_the_daemon_is_fuzzed(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "admin: {enabled: true, port: 0}\n")
    try:
        routes = served(rig.daemon.admin._server.config.app.routes)
    finally:
        rig.daemon.admin.stop()
        rig.close()
    orders = {(method, path) for method, path in routes if path.startswith("/control/")}
    assert orders == described(descriptions.orders())
    assert routes == described(descriptions.admin()) | {("get", path) for path in descriptions.NOT_WELL}
