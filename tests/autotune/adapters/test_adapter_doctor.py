"""What ``autotune doctor`` says of an engine of another make, and of restarts that are permitted."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.adapters.wire import watched_engine
from autotune.config import Config, parse_config
from autotune.doctor.finding import Finding, Level
from autotune.doctor.probes import real_probes
from autotune.doctor.run import Asked, examine
from autotune.doctor.torch_facts import TorchFacts
from autotune.doctor.watched import check_restart, check_watched
from engine.clock import ManualClock

KNOBS = {"kv-cache-dtype": "auto", "block-size": 16}


def config_of(url: str, more: str = "") -> Config:
    return parse_config(f"engine: {{kind: vllm, url: '{url}'{more}}}")


def watched(config: Config) -> Finding:
    engine = watched_engine(config, ManualClock())
    assert engine is not None
    (found,) = check_watched(config, engine.adapter)
    assert bool(found.advice) == (found.level is not Level.OK)
    return found


@pytest.fixture
def two(fake_engines: Any) -> Iterator[Any]:
    with fake_engines.FakeServer("vllm", KNOBS, engines=("0", "1")) as server:
        yield server


def test_an_engine_that_answers_and_one_that_does_not(fake_engines: Any) -> None:
    with fake_engines.FakeServer("vllm", KNOBS) as server:
        assert watched(config_of(server.url)).level is Level.OK
        server.knobs["kv-cache-dtype"] = "nvfp4"
        unknown = watched(config_of(server.url))
        assert (unknown.level, "does not tell its kv-cache-dtype" in unknown.found) == (Level.WARNING, True)
        server.alive = False
        assert watched(config_of(server.url)).level is Level.WARNING


def test_several_engines_on_a_page(two: Any) -> None:
    assert watched(config_of(two.url)).level is Level.PROBLEM
    assert watched(config_of(two.url, ", label: '1'")).level is Level.OK
    assert "no engine '2'" in watched(config_of(two.url, ", label: '2'")).found


def test_what_a_permitted_restart_needs(tmp_path: Path) -> None:
    probes = real_probes(sys.path)

    def found(**section: Any) -> Finding:
        config = config_of("http://127.0.0.1:1")
        restart = config.restart.model_copy(
            update={"allowed": True, "file": tmp_path / "a.env", "commands": ((sys.executable,),), **section}
        )
        (one,) = check_restart(probes, config.model_copy(update={"restart": restart}))
        assert bool(one.advice) == (one.level is not Level.OK)
        return one

    assert found(allowed=False).found == "not permitted: advice only"
    assert found().found.startswith("PERMITTED")
    assert found(commands=(("no-such-program",),)).level is Level.PROBLEM
    assert found(file=tmp_path / "missing" / "a.env").level is Level.PROBLEM
    (tmp_path / "a.env").write_text("theirs\n")
    assert "somebody else has written it" in found().found


def test_doctor_looks_at_it_in_place_of_our_engine(fake_engines: Any, tmp_path: Path) -> None:
    with fake_engines.FakeServer("vllm", KNOBS) as server:
        file = tmp_path / "daemon.yaml"
        file.write_text(f"engine: {{kind: vllm, url: '{server.url}'}}\njournal: {{path: {tmp_path / 'j.db'}}}\n")
        probes = replace(real_probes(sys.path), torch=lambda: TorchFacts("2.13.0+cpu", None, is_available=False))
        checks = {}
        for one in examine(probes, Asked(file, daemon=lambda _: None)):
            checks[one.check] = one
    assert checks["engine"].level is Level.OK
    assert checks["restart"].found == "not permitted: advice only"
    assert not {"control socket", "engine port"} & set(checks)
