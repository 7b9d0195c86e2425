"""The benchmark's frame: rows are found, one that fails or is skipped costs its own keys, the last line is JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from engine.cache_bench.__main__ import main
from engine.cache_bench.context import Context
from engine.cache_bench.registry import Row, load_rows, row_names
from engine.cache_bench.report import run_rows
from engine.clock import ManualClock


def context() -> Context:
    return Context(model=Path("nowhere"), log=lambda _line: None)


def test_a_failing_and_a_skipped_row_cost_their_own_keys_only() -> None:
    def broken(_context: Context) -> dict[str, object]:
        raise RuntimeError("no such luck")

    rows = [
        Row("broken", ("a", "b"), broken),
        Row("textless", ("c",), lambda given: {"c": given.need_text()}),
        Row("good", ("d",), lambda _given: {"d": 4.0}),
    ]
    report = run_rows(rows, context(), ManualClock())
    assert report.figures == {"a": None, "b": None, "c": None, "d": 4.0}
    assert report.failed == dict.fromkeys(("a", "b"), "RuntimeError: no such luck")
    assert report.skipped == {"c": "needs texts: make bench-cache TEXT=FOLDER"}


def test_a_row_that_yields_other_keys_than_promised_has_failed() -> None:
    report = run_rows([Row("liar", ("a",), lambda _given: {"a": 1, "b": 2})], context(), ManualClock())
    assert report.figures == {"a": None}
    assert "promises ['a'] and yields ['a', 'b']" in report.failed["a"]


def test_every_shipped_row_loads_and_no_key_is_claimed_twice() -> None:
    assert [row.name for row in load_rows()] == row_names()
    with pytest.raises(ValueError, match=r"no row is called 'nothing'; there are .*bits_per_element"):
        load_rows(["nothing"])


def test_two_rows_with_one_key_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "second"):
        (tmp_path / f"{name}.py").write_text("KEYS = ('same',)\ndef run(context): return {'same': 1}\n")
    package = ModuleType("bench_rows_of_a_test")
    package.__path__ = [str(tmp_path)]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    with pytest.raises(ValueError, match="rows first and second both yield same"):
        load_rows(package=package)
    assert [row.name for row in load_rows(["second"], package)] == ["second"]


def test_the_last_line_is_json_with_versions_device_and_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rows", "bits_per_element", "--text", ""]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["bits_per_element"] == {"native": 16.0, "int8": 8.75, "k8v4": 6.75, "int4": 4.75}
    assert document["versions"]["torch"]
    assert document["device"]
    assert document["wall_s"] >= 0


def test_a_folder_without_a_model_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "/nowhere"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
