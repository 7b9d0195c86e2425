"""The steps of the container file, carried out by hand: all but what needs root and a clean system."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("by_hand", ROOT / "deploy/container/by_hand.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "by_hand", module)  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_instructions_and_names(by_hand: Any) -> None:
    text = "# no\nARG A=1\n\nENV X=1 \\\n    Y=2\nRUN a && b\n"
    assert by_hand.instructions(text) == [("ARG", "A=1"), ("ENV", "X=1 Y=2"), ("RUN", "a && b")]
    assert by_hand.expanded("p:${A}-$B/$C", {"A": "1", "B": "2"}) == "p:1-2/$C"


def test_every_stage_is_built_on_the_right_root(by_hand: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[tuple[str, str, dict[str, str]]] = []

    def run(stage: Any, command: list[str], user: str = "") -> int:  # noqa: ARG001  # as the real one
        ran.append((stage.root.name, command[-1], dict(stage.arguments)))
        if "venv /opt/kv-autotune" in command[-1]:
            (stage.root / "opt/kv-autotune").mkdir(parents=True)
        return 3 if "FAIL" in command[-1] else 0

    monkeypatch.setattr(by_hand, "run", run)
    base, work = tmp_path / "base", tmp_path / "work"
    (base / "etc").mkdir(parents=True)
    work.mkdir()
    builder = by_hand.Builder(base, work, {"TORCH_INDEX": "http://x"}, [])
    for word, rest in by_hand.instructions((ROOT / "deploy/container/Containerfile").read_text()):
        assert builder.step(word, rest) == 0, (word, rest)
    assert list(builder.stages) == ["source", "build-daemon", "build-engine", "runtime", "daemon", "engine"]
    torch = next(arguments for name, command, arguments in ran if name == "build-engine" and "TORCH_INDEX" in command)
    assert torch == {"TORCH_INDEX": "http://x"}
    for name in ("daemon", "engine"):
        stage = builder.stages[name]
        assert (stage.user, stage.has_command) == ("65532:65532", True)
        assert stage.environment["PATH"].startswith("/opt/kv-autotune/bin:/usr/local/sbin:")
        assert (stage.root / "opt/kv-autotune").is_dir()
    assert (work / "source/src/engine/bundled/model/config.json").is_file()
    assert (work / "daemon/etc/kv-autotune/autotune.yaml").is_file()
    assert builder.step("RUN", "FAIL") == 3
    assert builder.step("HEALTHCHECK", "x") == 1
