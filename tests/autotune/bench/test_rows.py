"""Rows of the daemon's benchmark: the cheap ones run, the others' figures and bars hold on what they would see."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from autotune.bench import exposure, month
from autotune.bench.__main__ import main
from autotune.bench.constant import of_the_load
from autotune.bench.context import Context, Outcome
from autotune.bench.flat import rise_mb
from autotune.bench.processes import Child, has_mapped, processor_s, resident_bytes
from autotune.bench.soak import _growth
from autotune.journal_file import Tick
from engine.clock import RealClock


def context(folder: Path, **more: Any) -> Context:
    return Context(folder, folder, RealClock(), lambda _: None, **more)


@pytest.fixture
def _short_month(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows fill it, and nothing is said of its memory: a hundred collections of all that tests have loaded take
    longer than its ticks.
    """
    monkeypatch.setattr(month, "_MAX_ROWS", 100)
    monkeypatch.setattr(month.gc, "collect", lambda: 0)


@pytest.mark.usefixtures("_short_month")
def test_a_month_in_short_stays_in_its_bounds(tmp_path: Path) -> None:
    outcome = month.run(context(tmp_path, ticks=400))
    figures = outcome.figures
    assert figures["month_ticks"] == 400
    assert figures["month_journal_rows"] <= 130
    assert figures["month_journal_pruned_rows"] >= 270
    assert figures["month_tick_errors"] == 0
    assert [line for line in outcome.missed if "memory" not in line] == [], "so short a run says nothing of memory"


@pytest.mark.usefixtures("_short_month")
def test_a_month_without_pruning_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.journal.Journal.prune", lambda *_: 0)
    outcome = month.run(context(tmp_path, ticks=400))
    assert any("month_journal_rows is 400" in line for line in outcome.missed)


def test_a_bar_is_missed_from_above_and_without_a_figure() -> None:
    outcome = Outcome({"good": 1.0, "bad": 1.1, "none": None})
    for name in ("good", "bad", "none", "absent"):
        outcome.bar(name, 1.0)
    assert [line.split(" is ")[0] for line in outcome.missed] == ["bad", "none", "absent"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_exposure_is_systemds_own_word(tmp_path: Path) -> None:
    outcome = exposure.run(context(tmp_path))
    assert outcome.missed == []
    found = outcome.figures["security_exposure"]
    assert set(found) == {"autotune", "autotune-engine"}
    assert all(0 < value <= 2.0 for value in found.values())
    bad = tmp_path / "bad"
    bad.mkdir()
    for name in ("autotune", "autotune-engine"):
        (bad / f"{name}.service").write_text("[Service]\nExecStart=/usr/bin/true\nNonsense=1\n")
    exposure_of, exposure._UNITS = exposure._UNITS, bad  # type: ignore[misc]
    try:
        missed = exposure.run(context(tmp_path)).missed
    finally:
        exposure._UNITS = exposure_of  # type: ignore[misc]
    assert any("is exposed to 9" in line for line in missed)
    assert any("Nonsense" in line for line in missed)


def test_without_systemd_exposure_is_null_with_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    figures = exposure.run(context(tmp_path)).figures
    assert figures["security_exposure"] is None
    assert "systemd-analyze" in figures["security_skipped"]


def test_what_proc_says_of_a_child(tmp_path: Path) -> None:
    import sys

    code = "import numpy, sys; print('up', flush=True); sys.stdin.read()"
    child = Child("it", (sys.executable, "-c", f"{code}; import time; time.sleep(600)"), tmp_path / "log")
    child.start()
    try:
        from waiting import until

        until(lambda: child.last_words() == "up", "the child")
        assert 5e6 < resident_bytes(child.pid) < 500e6
        assert processor_s(child.pid) > 0
        assert has_mapped(child.pid, "/numpy/")
        assert not has_mapped(child.pid, "libtorch", "/torch/")
        assert child.is_alive
    finally:
        child.kill()
        child.reap()
    assert not child.is_alive


def test_flat_is_what_does_not_rise_over_the_last_half() -> None:
    steady = [10_000_000 + 1_000_000 * (i % 3 == 0) for i in range(200)]
    assert rise_mb(steady) == 0.0, "ups and downs"
    assert rise_mb([1_000_000 * min(i, 100) for i in range(200)]) == 0.0, "it was full by the middle"
    assert rise_mb([*steady[:150], 900_000_000, *steady[151:]]) == 0.0, "a peak"
    assert rise_mb([100_000 * i for i in range(200)]) == pytest.approx(10.0)
    assert rise_mb([-100_000 * i for i in range(200)]) == pytest.approx(-10.0)
    assert rise_mb([1] * 19) == 0.0
    assert rise_mb([1] * 18) is None, "too few to tell"


def test_only_the_first_turn_back_after_a_release_is_not_the_loads() -> None:
    def change(stamp: int, knob: str) -> Tick:
        return Tick(stamp, "run", 0.0, stamp, True, {"written": ["applied", "", 1], "decision": {"knob": knob}})

    hold, back, other, again = (
        change(20, "block_size"), change(31, "kv_format"), change(32, "block_size"), change(33, "kv_format")
    )  # fmt: skip
    assert of_the_load([hold, back, other, again], released_ns=30) == [hold, other, again]
    assert of_the_load([change(10, "kv_format")], released_ns=30) == [change(10, "kv_format")]


def test_growth_is_from_the_second_tenth_to_the_last() -> None:
    assert _growth([10_000_000] * 10 + [50_000_000] * 90) == 0.0, "warming up is no growth"
    assert _growth([10_000_000 + 1_000_000 * i for i in range(100)]) == 80.0


def test_the_last_line_is_json_and_says_what_was_missed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(_: Context) -> Outcome:
        return Outcome({"security_exposure": {"autotune": 9.0}}, ["autotune is exposed to 9.0"])

    monkeypatch.setattr(exposure, "run", run)
    assert main(["--rows", "exposure", "--json", str(tmp_path / "out.json"), "--folder", str(tmp_path)]) == 1
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["missed"] == ["autotune is exposed to 9.0"]
    assert json.loads((tmp_path / "out.json").read_text()) == document

    def fail(_: Context) -> Outcome:
        raise OSError("no room")

    monkeypatch.setattr(exposure, "run", fail)
    assert main(["--rows", "exposure", "--folder", str(tmp_path)]) == 1
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["security_exposure"] is None
    assert document["failed"] == {"exposure": "OSError: no room"}


@pytest.mark.slow
def test_a_few_kills_of_real_processes(tmp_path: Path) -> None:
    from autotune.bench import kills
    from autotune.demo.bundled import bundled_model

    outcome = kills.run(Context(bundled_model(), tmp_path, RealClock(), print, seed=1, kills=4))
    assert outcome.missed == [], outcome.figures["kill9_violations"]
    assert outcome.figures["kill9_lost_otherwise"] == 0
